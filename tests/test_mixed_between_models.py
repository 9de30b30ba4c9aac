"""Steps that mix samples between two models, which both learn."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import COUNTS
from keras import layers
from keras import ops
from models import assert_same_training

import keras_conflux as kc

RNG = np.random.default_rng(0)
X = RNG.normal(size=(19, 5)).astype("float32")
Y = X[:, :1]


def _penalty(z, rest):
    """Of the slopes of what follows, as a critic's."""
    with tf.GradientTape() as tape:
        tape.watch(z)
        predicted = ops.tanh(rest(z)) ** 2
    slopes = tape.gradient(predicted, z)
    return predicted, ops.mean(ops.sqrt(ops.sum(slopes**2, 1) + 1e-3))


def _penalty_by_features(h, rest):
    with tf.GradientTape() as tape:
        tape.watch(h)
        predicted = ops.tanh(rest(h - 0.5 * ops.mean(h, 0))) ** 2
    return predicted, ops.mean(tape.gradient(predicted, h) ** 2)


MIXED = {
    "the order": lambda h, scale: 0.7 * h + 0.3 * h[::-1],
    "neighbours": lambda h, scale: ops.roll(h, 1, 0) * h,
    "a mean": lambda h, scale: h - 0.5 * ops.mean(h, 0),
    "by a weight": lambda h, scale: scale * h - ops.mean(h, 0) * scale**2,
    "deviations": lambda h, scale: scale * h / ops.sqrt(ops.var(h, 0) + 0.1),
    "a sum": lambda h, scale: 0.1 * h * ops.mean(ops.sum(h, 0)),
    "the largest": lambda h, scale: 0.3 * (h + ops.max(h, 0)),
    "each with each": lambda h, scale: ops.softmax(h @ ops.transpose(h)) @ h,
    "twice": lambda h, scale: (lambda z: z - 0.5 * ops.mean(z, 0))(h + h[::-1]),
    "by a constant seed": lambda h, scale: (
        h * tf.random.stateless_uniform((ops.shape(h)[0], 1), seed=[1, 2])
    ),
}
PENALTIES = {
    "slopes by what is mixed": lambda h, rest: _penalty(h + h[::-1], rest),
    "slopes by what is centered": lambda h, rest: _penalty(
        h - 0.5 * ops.mean(h, 0), rest
    ),
    "slopes by features": _penalty_by_features,
}


class Two(keras.Model):
    """An encoder, and what gets its mixed features."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.encoder, self.decoder = (
            layers.Dense(units, bias_initializer="ones") for units in (4, 1)
        )
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return self.decoder(self.encoder(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            h = self.encoder(x)
            if self.kind in PENALTIES:
                predicted, penalty = PENALTIES[self.kind](h, self.decoder)
            else:
                predicted = self.decoder(MIXED[self.kind](h, self.scale))
                penalty = 0.0
            loss = ops.mean((predicted - y) ** 2) + penalty
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def trained(kind, count, microbatches=1, jit="auto"):
    keras.utils.set_random_seed(1)
    model = Two(kind)
    model(X[:1])
    if count:
        kc.replicate(model, count, microbatches=microbatches)
    model.compile(keras.optimizers.SGD(0.05), jit_compile=jit)
    before = model.encoder.kernel.numpy()
    # The last batch has one sample.
    logs = model.fit(X, Y, 6, epochs=2, shuffle=False, verbose=0)
    assert np.abs(model.encoder.kernel.numpy() - before).max() > 1e-2
    return model, logs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [*MIXED, *PENALTIES])
def test_gradients_pass_what_replicas_exchange(kind):
    one, one_logs = trained(kind, None)
    for count in COUNTS:
        many, many_logs = trained(kind, count)
        assert_same_training(one, many, one_logs, many_logs)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deviations", "slopes by what is mixed"])
def test_they_pass_what_turns_exchange(kind):
    one, one_logs = trained(kind, None)
    many, many_logs = trained(kind, COUNTS[-1], microbatches=2)
    assert_same_training(one, many, one_logs, many_logs)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind", ["by a constant seed", "slopes by what is mixed"]
)
def test_they_pass_in_models_that_xla_compiles(kind):
    one, one_logs = trained(kind, None, jit=True)
    for count in COUNTS:
        many, many_logs = trained(kind, count, jit=True)
        assert_same_training(one, many, one_logs, many_logs)
