"""Losses in `fit` that the user makes of the values of all replicas.

A collective of the user's may be anywhere in a step. The loss is one device's
all the same, whether it is made of what the collective returns or not.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import RUN_LONG_TESTS
from conftest import several
from keras import ops

import keras_conflux as kc

pytestmark = pytest.mark.usefixtures("in_float64")
X = np.random.default_rng(0).normal(size=(19, 6))  # the last batch has 3
Y = X[:, :2] ** 2 + X[:, 2:4]


def rms(x):
    return ops.sqrt(ops.mean(x**2))


def mean_of_all(x):
    return kc.allreduce("mean", ops.mean(x, 0), weight=ops.shape(x)[0])


def sum_of_all(x):
    return kc.allreduce("sum", ops.sum(x))


def not_used(p, y):
    kc.allreduce("max", ops.max(p))
    return rms(p - y)


def masked_and_not_used(p, y):
    kc.allgather(p)
    seen = ops.cast(y > 2, p.dtype)  # in the samples of some replicas only
    return ops.sum((p - y) ** 2 * seen) / (ops.sum(seen) + 1)


def correlation(p, y):
    p, y = p - mean_of_all(p), y - mean_of_all(y)
    return -ops.mean(p * y) / ops.sqrt(ops.mean(p**2) * ops.mean(y**2))


def standardized(p, y):
    every = kc.allgather(p)
    p = (p - ops.mean(every, 0)) / (ops.std(every, 0) + 1)
    return rms(p - y)


def decorrelated(p, y):
    one, other = kc.allgather(p), kc.allgather(y)
    size = ops.cast(ops.shape(one)[0], one.dtype)
    found = ops.matmul(ops.transpose(one), other) / size
    return ops.sum((found - ops.eye(2, dtype=one.dtype)) ** 2)


def spread(p, y):
    deviations = ops.sqrt(ops.var(kc.allgather(p), 0) + 1e-4)
    return ops.mean((p - y) ** 2) + ops.mean(ops.relu(1 - deviations))


def contrasted(p, y):
    scores = ops.matmul(p, ops.transpose(kc.allgather(p)))
    return rms(ops.logsumexp(scores, -1) - ops.sum(p * y, -1))


def per_sample(p, y):
    return ops.mean((p - ops.mean(kc.allgather(p), 0) - y) ** 2, -1)


def share(p, y):
    seen = ops.cast(y > 0.2, p.dtype)
    return ops.sum((p - y) ** 2 * seen) / sum_of_all(seen)


LOSSES = {
    "a collective that it does not need": not_used,
    "as many samples as a mask has": masked_and_not_used,
    "a root of a sum": lambda p, y: ops.sqrt(sum_of_all((p - y) ** 2)),
    "a root of a mean": lambda p, y: ops.sqrt(
        ops.mean(mean_of_all((p - y) ** 2))
    ),
    "a sum of roots": lambda p, y: rms(p) + ops.sqrt(sum_of_all((p - y) ** 2)),
    "a product of roots": lambda p, y: (
        rms(p) * ops.sqrt(sum_of_all((p - y) ** 2))
    ),
    "a product with a mean": lambda p, y: (
        ops.mean(p**2) * ops.sqrt(sum_of_all((p - y) ** 2))
    ),
    "the largest of all": lambda p, y: (
        rms(p - y) / kc.allreduce("max", ops.max(y))
    ),
    "the largest of all, by which nobody differentiates": lambda p, y: (
        rms(p - y) / tf.stop_gradient(kc.allreduce("max", ops.max(abs(p))))
    ),
    "a mean without a weight": lambda p, y: rms(
        p - kc.allreduce("mean", ops.mean(p, 0)) - y
    ),
    "a deviation of gathered rows": lambda p, y: (
        rms(p - y) * ops.std(kc.allgather(p))
    ),
    "a norm of gathered rows": lambda p, y: (
        rms(p - y) / ops.norm(kc.allgather(p))
    ),
    "a median of gathered rows": lambda p, y: ops.mean(
        abs(p - ops.median(kc.allgather(p), 0) - y)
    ),
    "a correlation": correlation,
    "standardized rows": standardized,
    "a matrix of gathered rows": decorrelated,
    "a term of gathered rows": spread,
    "rows against gathered rows": contrasted,
    "a loss of each sample": per_sample,
    "a share of a sum": share,
}
PLACES = ["a step", "compile", "microbatches"]
EACH = [*itertools.product(LOSSES, PLACES)]
if not RUN_LONG_TESTS:  # each loss in one place
    EACH = [*zip(LOSSES, itertools.cycle(PLACES), strict=False)]


class Exchanging(keras.Model):
    """Trains by a loss of its outputs and the targets."""

    def __init__(self, loss):
        super().__init__()
        self._loss = loss
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self._loss(self(x), y)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": ops.mean(loss)}


def trained(loss, place, devices):
    """Returns what `fitted` does, of a model with a loss in a place."""
    keras.utils.set_random_seed(1)
    if place == "compile":
        model = keras.Sequential([keras.layers.Dense(2)])
    else:
        model = Exchanging(loss)
    turns = 2 if place == "microbatches" else 1
    return fitted(model, devices, lambda y, p: loss(p, y), turns)


def fitted(model, devices, loss=None, turns=1):
    """Returns the weights after two epochs, and the losses."""
    model.compile(keras.optimizers.SGD(0.1), loss)
    kc.replicate(model, devices, microbatches=turns)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return *model.get_weights(), history.history["loss"]


def assert_same(expected, got):
    for one, other in zip(expected[:-1], got[:-1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(expected[-1], got[-1], rtol=1e-6)  # in float32


@several
@pytest.mark.parametrize(("loss", "place"), EACH)
def test_a_loss_is_one_devices(loss, place):
    expected = trained(LOSSES[loss], place, 1)
    got = trained(LOSSES[loss], place, MANY)
    assert_same(expected, got)


class Centered(keras.layers.Layer):
    """Subtracts what a function makes of the rows of all replicas."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def call(self, x):
        return x - self._function(x)

    def compute_output_shape(self, shape):
        return shape


CENTERS = {
    "mean": mean_of_all,
    "sum": lambda x: kc.allreduce("sum", ops.sum(x, 0)),
    "max": lambda x: tf.stop_gradient(kc.allreduce("max", ops.max(x, 0))),
    "rows": lambda x: ops.mean(kc.allgather(x), 0),
    "moments": lambda x: sum(ops.moments(x, 0, synchronized=True)),
}


@several
@pytest.mark.parametrize("center", CENTERS)
def test_a_layer_that_exchanges(center):
    """No warning, which is an error in tests, is to ask for what it does."""

    def centered(devices):
        keras.utils.set_random_seed(1)
        dense = [keras.layers.Dense(2) for _ in range(2)]
        layers = [dense[0], Centered(CENTERS[center]), dense[1]]
        model = keras.Sequential(layers)
        return fitted(model, devices, lambda y, p: rms(y - p))

    assert_same(centered(1), centered(MANY))


class Queued(Exchanging):
    """Compares with the rows of earlier steps, as MoCo does."""

    def __init__(self):
        super().__init__(None)
        self.rows = self.add_weight(
            shape=(12, 2),
            initializer="random_normal",
            trainable=False,
        )

    def train_step(self, data):
        x, _ = data
        every = kc.allgather(self(x))
        rows = ops.concatenate([tf.stop_gradient(every), self.rows])
        self.rows.assign(rows[:12])
        with tf.GradientTape() as tape:
            scores = ops.matmul(self(x), ops.transpose(self.rows))
            loss = ops.mean(ops.logsumexp(scores, -1))
        weights = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@several
def test_rows_of_all_replicas_in_a_queue():
    def queued(devices):
        keras.utils.set_random_seed(1)
        return fitted(Queued(), devices)

    assert_same(queued(1), queued(MANY))
