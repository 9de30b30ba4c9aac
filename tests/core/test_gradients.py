"""Gradients that wait for the optimizer before they are reduced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import several
from keras import layers
from keras import optimizers

import keras_conflux as kc
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._fit.numerics import gradients

TOKENS = np.random.default_rng(0).integers(0, 50, (12, 6)).astype("int32")
Y = TOKENS[:, :1].astype("float32") / 50


class Squared(optimizers.SGD):
    """Squares gradients before they are applied."""

    def apply(self, grads, trainable_variables=None):
        grads = [2 * tf.convert_to_tensor(g) ** 2 for g in grads]
        return super().apply(grads, trainable_variables)


def trained(optimizer, shard, replicated=True):
    keras.utils.set_random_seed(0)
    tokens = layers.Input((6,), dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(50, 96)(tokens))
    x = layers.MultiHeadAttention(2, 8)(x, x)
    model = keras.Model(tokens, layers.Dense(1)(layers.Flatten()(x)))
    model.compile(optimizer, "mse")
    if replicated:
        kc.replicate(model, devices=2, shard=shard)
    model.fit(TOKENS, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.fixture
def as_on_gpus(dense_gradients, monkeypatch):
    """Sparse gradients become dense, and no rule knows some attention."""

    def global_values(grads, step):
        raise NotDerivable("attention in one kernel")

    monkeypatch.setattr(gradients, "global_values", global_values)


@several
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("steps", "shard"), [(2, None), (None, "optimizer"), (2, "optimizer")]
)
@pytest.mark.parametrize("kind", [optimizers.SGD, Squared])
def test_postponed_gradients_of_embeddings(as_on_gpus, steps, shard, kind):
    """An optimizer whose scale counts gets them once, with their weights."""
    if kind is Squared and shard:
        kind.conflux_elementwise = True
    found, expected = (
        trained(
            kind(0.01, gradient_accumulation_steps=steps),
            shard,
            replicated,
        )
        for replicated in (True, False)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_rows_that_occur_twice_are_added_up(shape):
    rows = tf.reshape(tf.range(1.0, 1 + 4 * np.prod(shape)), [4, *shape])
    sparse = tf.IndexedSlices(rows, tf.constant([4, 0, 4, 2]), [5, *shape])
    found = gradients.dense(sparse)
    np.testing.assert_array_equal(found, tf.convert_to_tensor(sparse))
