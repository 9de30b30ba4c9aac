"""Normalization by the samples of all replicas, chosen for a whole model."""

import logging

import keras
import numpy as np
import pytest
from conftest import MANY
from conftest import several
from models import assert_same_training

import keras_conflux as kc

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 4)).astype("float32")
Y = RNG.normal(size=(22, 1)).astype("float32")


class Block(keras.layers.Layer):
    """Holds a normalization in a list, as only its attributes tell."""

    def __init__(self):
        super().__init__()
        self.steps = [
            keras.layers.Dense(4, use_bias=False),
            keras.layers.BatchNormalization(),
        ]

    def call(self, x, training=None):
        dense, normalize = self.steps
        return keras.ops.tanh(normalize(dense(x), training=training))


def nested() -> keras.Model:
    """A model in a model in which a layer holds a normalization."""
    keras.utils.set_random_seed(1)
    inner = keras.Sequential([keras.Input((4,)), Block()])
    model = keras.Sequential(
        [
            keras.Input((4,)),
            inner,
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


def fit(model: keras.Model) -> keras.callbacks.History:
    return model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)


def before(model):
    kc.replicate(kc.synchronize_batch_norm(model), MANY)


def after(model):
    kc.replicate(model, MANY)
    assert kc.synchronize_batch_norm(model) is model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("when", [before, after])
def test_normalizes_as_one_device(when):
    one, many = nested(), nested()
    when(many)
    assert_same_training(one, many, fit(one), fit(many))
    kc.assert_in_sync(many)


def masked() -> keras.Model:
    """Normalizes what is not masked, of which one replica has none."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(6, 3, mask_zero=True),
            keras.layers.BatchNormalization(),
            # cuDNN's wants what is masked at the end.
            keras.layers.GRU(3, use_cudnn=False),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("when", [before, after])
def test_normalizes_what_a_mask_leaves_as_one_device(when):
    words = RNG.integers(0, 6, (22, 5))
    words[:2] = words[:, -1] = 0
    one, many = masked(), masked()
    when(many)
    histories = [
        model.fit(words, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        for model in (one, many)
    ]
    assert_same_training(one, many, *histories)
    kc.assert_in_sync(many)


LOSSES = {
    "mean": lambda off, w: keras.ops.mean(off**2),
    "sum": lambda off, w: keras.ops.sum(off**2),
    "weighted mean": lambda off, w: (
        keras.ops.sum(off**2 * w) / keras.ops.sum(w)
    ),
    "norm": lambda off, w: keras.ops.norm(off),
    "largest": lambda off, w: keras.ops.max(off**2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("samples", [1, MANY - 1, MANY + 1])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_replica_without_samples_has_no_share_in_gradients(loss, samples):
    def step_loss(y_true, y_pred):
        return loss(y_true - y_pred, keras.ops.abs(y_true))

    one, many = nested(), nested()
    for model in (one, many):
        model.compile(keras.optimizers.SGD(0.05), step_loss, jit_compile=False)
    before(many)
    some = X[: 6 + samples], Y[: 6 + samples]
    histories = [
        model.fit(*some, batch_size=6, epochs=2, shuffle=False, verbose=0)
        for model in (one, many)
    ]
    assert_same_training(one, many, *histories)
    kc.assert_in_sync(many)


@pytest.mark.long
@several
def test_what_was_traced_is_forgotten():
    one, many = nested(), kc.replicate(nested(), MANY)
    for model in (one, many):
        model.optimizer.learning_rate = 0.0
        fit(model)
        model.optimizer.learning_rate = 0.05
    kc.synchronize_batch_norm(many)
    many.set_weights(one.get_weights())
    assert_same_training(one, many, fit(one), fit(many))


def test_one_device_computes_the_same():
    one, other = nested(), kc.synchronize_batch_norm(nested())
    assert_same_training(one, other, fit(one), fit(other))


def test_wants_a_layer():
    with pytest.raises(TypeError, match="takes a Keras model or layer"):
        kc.synchronize_batch_norm([nested()])


def said_of(caplog) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [each for each in messages if "is normalized" in each]


def in_scope():
    with kc.replicate(devices=MANY).scope():
        return nested()


@several
@pytest.mark.parametrize("build", [in_scope, lambda: kc.replicate(nested())])
def test_training_says_once_what_is_not_synchronized(build, caplog):
    caplog.set_level(logging.INFO, "keras_conflux")
    model = build()
    model.evaluate(X, Y, verbose=0)
    assert said_of(caplog) == []
    fit(model)
    (said,) = said_of(caplog)
    assert model.layers[1].name in said
    assert "`keras_conflux.synchronize_batch_norm(model)`" in said
    fit(kc.replicate(model))
    assert said_of(caplog) == []


@several
def test_nothing_is_said_where_one_device_computes_the_same(caplog):
    caplog.set_level(logging.INFO, "keras_conflux")
    fit(kc.replicate(kc.synchronize_batch_norm(nested()), MANY))
    fit(kc.synchronize_batch_norm(kc.replicate(nested(), MANY)))
    fit(kc.replicate(nested(), 1))
    frozen = nested()
    for layer in frozen.layers[:2]:
        layer.trainable = False
    frozen.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    fit(kc.replicate(frozen, MANY))
    assert said_of(caplog) == []


@several
@pytest.mark.filterwarnings("ignore:.*copies come apart")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_loop_says_once_what_is_not_synchronized(is_frozen, caplog):
    caplog.set_level(logging.INFO, "keras_conflux")
    model = in_scope()
    model.layers[0].trainable = not is_frozen
    step = kc.withdevices(lambda x: model(x, training=True), devices=MANY)
    for rows in (6, 7):
        step(kc.split(X[:rows], MANY))
    (said,) = said_of(caplog)
    assert "each of" in said
    assert (model.layers[1].name in said) == is_frozen
