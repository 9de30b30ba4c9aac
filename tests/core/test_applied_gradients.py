"""Gradients that a user's step changes before an optimizer applies them.

One of them is sparse, as of an embedding.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from keras import layers
from models import assert_same_training

import keras_conflux as kc

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 9, (14, 5)).astype("int32")
Y = RNG.normal(size=(14, 3)).astype("float32")
BIG = RNG.normal(size=(14, 400, 400)).astype("float32")
"""Samples that are too large to be exchanged."""


class Model(keras.Model):
    """Applies the gradients that a function makes."""

    def __init__(self, made):
        super().__init__()
        self.made = made
        self.embedding = layers.Embedding(9, 4)
        self.dense = layers.Dense(3)

    def build(self, shape):
        self.embedding.build(shape)
        self.dense.build((None, 4))
        super().build(shape)

    def call(self, x):
        return self.dense(tf.reduce_mean(self.embedding(x), 1))

    def train_step(self, data):
        grads = self.made(self, *data)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"y": tf.reduce_mean(data[1])}


def _of_tape(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((y - model(x)) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def _times(grads, factor):
    return [
        tf.IndexedSlices(g.values * factor, g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g * factor
        for g in grads
    ]


def _of_tensorflow(reduce):
    def made(model, x, y):
        loss = reduce(tf.reduce_sum((y - model(x)) ** 2, 1))
        return tf.gradients(loss, [w.value for w in model.trainable_variables])

    return made


def _by_hand(model, x, y):
    rows = tf.tile(tf.reduce_sum(y, 1, keepdims=True), [1, 4])
    others = [tf.zeros_like(w) for w in model.trainable_variables[1:]]
    return [tf.IndexedSlices(rows, x[:, 0], tf.constant([9, 4])), *others]


def _added(model, x, y):
    first, second, third = _of_tape(model, x, y)
    return [first, second, third + tf.reduce_sum(y, 0)]


FACTORS = {
    "a largest value": lambda x, y: tf.reduce_max(y),
    "a sum": lambda x, y: tf.reduce_sum(y**2),
    "a mean": lambda x, y: tf.reduce_mean(y),
    "a number of samples": lambda x, y: tf.cast(tf.shape(x)[0], y.dtype),
    "a condition": lambda x, y: tf.cast(tf.reduce_max(y) < 1.9, y.dtype),
}
MADE = {
    **{
        name: lambda model, x, y, f=factor: _times(
            _of_tape(model, x, y), f(x, y)
        )
        for name, factor in FACTORS.items()
    },
    "slopes of a mean": _of_tensorflow(tf.reduce_mean),
    "slopes of a sum": _of_tensorflow(tf.reduce_sum),
    "slopes of a norm": _of_tensorflow(tf.norm),
    "by hand": _by_hand,
    "a sum is added": _added,
}


def trained(made, x, devices):
    keras.utils.set_random_seed(0)
    model = Model(made)
    model.build((None, 5))
    sgd = keras.optimizers.SGD(0.05, momentum=0.5)
    model.compile(sgd, jit_compile=False)
    if devices:
        kc.replicate(model, devices)
    return model, model.fit(x, Y, batch_size=7, shuffle=False, verbose=0)


@several
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MADE)
def test_gradients_are_of_all_samples(name):
    one, first = trained(MADE[name], TOKENS, None)
    many, second = trained(MADE[name], TOKENS, MANY)
    assert_same_training(one, many, first, second)


def _by_python(model, x, y):
    factor = tf.numpy_function(np.std, [y], y.dtype)
    return _times(_of_tape(model, x, y), tf.ensure_shape(factor, []))


def _by_large_samples(model, x, y):
    tokens = tf.cast(x[:, 0, :5] > 0, tf.int32)
    return _times(_of_tape(model, tokens, y), tf.reduce_max(x))


def _of_rows_of_a_jacobian(model, x, y):
    weights = model.trainable_variables[1:]
    x = tf.stop_gradient(tf.reduce_mean(model.embedding(x), 1))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.sqrt(tf.reduce_mean((y - model.dense(x)) ** 2, 0))
    found = tape.jacobian(loss, weights)
    none = tf.zeros_like(model.trainable_variables[0])
    return [none, *(tf.reduce_sum(each, 0) for each in found)]


UNKNOWN = {
    "Python code": (_by_python, TOKENS),
    "large samples": (_by_large_samples, BIG),
    "a jacobian": (_of_rows_of_a_jacobian, TOKENS),
}


@several
@pytest.mark.parametrize("name", UNKNOWN)
def test_gradients_that_cannot_be_known_are_named(name):
    with pytest.warns(kc.ConfluxWarning, match="gradients that an optimizer"):
        trained(*UNKNOWN[name], MANY)


class Measured(Model):
    """Gives a number to a metric, or a weight."""

    def __init__(self, given):
        super().__init__(given)
        self.mean = keras.metrics.Mean(name="largest")

    def train_step(self, data):
        x, y = data
        largest = tf.reduce_max(x)
        if self.made == "weight":
            self.mean.update_state(tf.reduce_mean(y), largest)
        else:
            self.mean.update_state(largest)
        return {"mean": self.mean.result()}


@several
@pytest.mark.parametrize("given", ["value", "weight"])
def test_a_number_for_a_metric_that_cannot_be_known_is_named(given):
    model = Measured(given)
    model.build((None, 5))
    model.compile("sgd", jit_compile=False)
    kc.replicate(model, MANY)
    with pytest.warns(kc.ConfluxWarning, match="input of the metric 'largest'"):
        model.fit(BIG, Y, batch_size=7, verbose=0)
