"""The loss of `examples/vocabulary_in_parts.py` is that of all logits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from keras import layers
from xla_memory import bytes_alive

import keras_conflux as kc
from examples import vocabulary_in_parts as example

WORDS, LENGTH = 40, 8
TOKENS = np.random.default_rng(0).integers(0, WORDS, (8, LENGTH + 1))
SEEN, NEXT = TOKENS[:, :-1], TOKENS[:, 1:]


def trained(in_parts, devices=None, dtype="float32", weights=None):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    try:
        tokens = keras.Input((LENGTH,), dtype="int32")
        hidden = layers.LayerNormalization()(
            layers.Embedding(WORDS, 16)(tokens)
        )
        if in_parts:
            last = example.Vocabulary(WORDS, parts=4)
            loss = last.loss
        else:
            last = layers.Dense(WORDS)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = keras.Model(tokens, last(hidden))
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(keras.optimizers.SGD(0.5), loss, jit_compile=False)
    if devices:
        kc.replicate(model, devices)
    counts = np.arange(1.0, 9)  # weights of samples
    history = model.fit(
        SEEN, NEXT, batch_size=8, epochs=3, verbose=0, sample_weight=counts
    )
    return [np.array(history.history["loss"]), *model.get_weights()]


@pytest.mark.parametrize(
    ("dtype", "atol"), [("float32", 1e-6), ("mixed_bfloat16", 2e-2)]
)
def test_it_is_the_loss_of_all_logits(dtype, atol):
    found, wanted = trained(True, dtype=dtype), trained(False, dtype=dtype)
    assert wanted[0][-1] < wanted[0][0]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=atol)


@pytest.mark.long
def test_replicas_train_as_one_device():
    for one, many in zip(trained(True), trained(True, MANY), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


def temporary_bytes(in_parts):
    """Returns the bytes of temporary tensors of a gradient through XLA."""
    words = 4096
    last = example.Vocabulary(words, parts=8)
    last.build((None, 64, 16))

    @tf.function(jit_compile=True)
    def gradients(x, labels):
        with tf.GradientTape() as tape:
            tape.watch(x)
            if in_parts:
                losses = last.loss(labels, x)
            else:
                losses = keras.losses.sparse_categorical_crossentropy(
                    labels, last(x, as_logits=True), from_logits=True
                )
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, [x, last.kernel.value, last.bias.value])

    x, labels = tf.ones((8, 64, 16)), tf.zeros((8, 64), tf.int32)
    ir = gradients.experimental_get_compiler_ir(x, labels)
    return bytes_alive(ir(stage="optimized_hlo"))


@pytest.mark.long
def test_memory():
    logits = 4 * 512 * 4096
    assert temporary_bytes(False) > 1.9 * logits
    assert temporary_bytes(True) < 0.4 * logits


@pytest.mark.long
def test_the_example_runs(capsys):
    example.main()
    assert "right: 100%" in capsys.readouterr().out
