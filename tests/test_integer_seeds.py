"""Random numbers of integer seeds: those of one device, row by row."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from keras import ops
from keras import random
from models import assert_same_training

import keras_conflux as kc

pytestmark = pytest.mark.skipif(MANY < 3, reason="needs three devices")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 1)).astype("float32")


class Draws(keras.layers.Layer):
    """Adds to its inputs what `draw` draws for them, for each of them."""

    def __init__(self, **draws):
        super().__init__()
        self.draws = draws

    def call(self, x):
        return {
            name: x + ops.cast(draw(x, ops.shape(x)), x.dtype)
            for name, draw in self.draws.items()
        }

    def compute_output_shape(self, shape):
        return dict.fromkeys(self.draws, shape)


def _noise_shape(x, shape):
    return random.dropout(x, 0.5, noise_shape=(shape[0], 1), seed=42)


DRAWS = {
    "normal": lambda x, s: random.normal(s, seed=42),
    "shape of tensors": lambda x, s: random.normal(tf.shape(x), seed=42),
    "means of rows": lambda x, s: random.normal(s, mean=x, seed=42),
    "one mean": lambda x, s: random.normal(s, mean=x[:1] * 0, seed=42),
    "truncated_normal": lambda x, s: random.truncated_normal(s, seed=42),
    "uniform": lambda x, s: random.uniform(s, -1.0, 1.0, seed=42),
    "randint": lambda x, s: random.randint(s, 0, 99, seed=42),
    "gamma": lambda x, s: random.gamma(s, 2.0, seed=42),
    "beta": lambda x, s: random.beta(s, 2.0, 3.0, seed=42),
    "binomial": lambda x, s: random.binomial(s, 9.0, 0.5, seed=42),
    "categorical": lambda x, s: random.categorical(x, 4, seed=42),
    "dropout": lambda x, s: random.dropout(x, 0.5, seed=42),
    "dropout of rows": _noise_shape,
    "dropout of columns": lambda x, s: random.dropout(
        x, 0.5, noise_shape=(1, 4), seed=42
    ),
    "a fixed projection": lambda x, s: x @ random.normal((4, 4), seed=42),
    "a vector": lambda x, s: random.normal((4,), seed=42),
}


@pytest.mark.long
def test_predictions():
    one = keras.Sequential([Draws(**DRAWS)])
    many = kc.replicate(keras.Sequential([Draws(**DRAWS)]), 3)
    for rows in (7, 1):  # the last batch has fewer
        expected = one.predict(X, batch_size=rows, verbose=0)
        got = many.predict(X, batch_size=rows, verbose=0)
        for name in DRAWS:
            np.testing.assert_allclose(
                got[name], expected[name], rtol=1e-6, err_msg=name
            )


def _halves(draw):
    """Adds up what is drawn for two views of the samples."""

    def drawn(x, shape):
        count = shape[0]
        both = draw(ops.concatenate([x, -x], 0), (2 * count, shape[1]))
        return both[:count] + 10 * both[count:]

    return drawn


def _repeated(x, shape):
    kept = random.dropout(ops.repeat(x, 2, 0), 0.5, seed=42)
    return ops.sum(ops.reshape(kept, (-1, 2, 4)) * [[1.0], [10.0]], 1)


VIEWS = {
    "normal": _halves(lambda x, s: random.normal(s, seed=42)),
    "shape of tensors": _halves(
        lambda x, s: random.normal(tf.shape(x), seed=4)
    ),
    "means of rows": _halves(lambda x, s: random.normal(s, mean=x, seed=42)),
    "one mean": _halves(lambda x, s: random.normal(s, mean=x[:1] * 0, seed=4)),
    "categorical": _halves(lambda x, s: random.categorical(x, 4, seed=42)),
    "dropout": _halves(lambda x, s: random.dropout(x, 0.5, seed=42)),
    "repeated": _repeated,
    "a fixed projection": lambda x, s: x @ random.normal((4, 4), seed=42),
}


@pytest.mark.long
def test_several_rows_for_each_sample():
    one = keras.Sequential([Draws(**VIEWS)])
    many = kc.replicate(keras.Sequential([Draws(**VIEWS)]), 3)
    for rows in (7, 1):
        expected = one.predict(X, batch_size=rows, verbose=0)
        got = many.predict(X, batch_size=rows, verbose=0)
        for name in VIEWS:
            np.testing.assert_allclose(
                got[name], expected[name], rtol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("draw", ["normal", "dropout"])
def test_training_of_two_views(draw):
    models = []
    for count in (None, 2):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        (drawn,) = Draws(**{"one": VIEWS[draw]})(inputs).values()
        model = keras.Model(inputs, keras.layers.Dense(1)(drawn))
        model.compile("sgd", lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)))
        if count:
            kc.replicate(model, count)
        model.fit(X, Y, epochs=2, batch_size=7, shuffle=False, verbose=0)
        models.append(model)
    assert_same_training(*models)


# Of as many rows as a replica has samples, and of as many as the batch has.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [16, 8, 7])
@pytest.mark.parametrize("draw", ["normal", "dropout", "a fixed projection"])
def test_training(draw, size):
    models = []
    for count in (None, 2):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        (drawn,) = Draws(**{"one": DRAWS[draw]})(inputs).values()
        model = keras.Model(inputs, keras.layers.Dense(1)(drawn))
        model.compile("sgd", "mse")
        if count:
            kc.replicate(model, count)
        model.fit(X, Y, epochs=2, batch_size=size, shuffle=False, verbose=0)
        models.append(model)
    assert_same_training(*models)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("draw", ["normal", "means of rows", "dropout"])
def test_training_of_what_comes_before(draw, size):
    models = []
    for count in (None, 2):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(4)(inputs)
        (drawn,) = Draws(**{"one": DRAWS[draw]})(hidden).values()
        model = keras.Model(inputs, keras.layers.Dense(1)(drawn))
        model.compile("sgd", lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)))
        if count:
            kc.replicate(model, count)
        model.fit(X, Y, epochs=2, batch_size=size, shuffle=False, verbose=0)
        models.append(model)
    assert_same_training(*models)


def test_variables_made_in_a_step_are_equal():
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            kernel = keras.initializers.RandomNormal(seed=3)
            self.dense = keras.layers.Dense(1, kernel_initializer=kernel)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean((self.dense(x) - y) ** 2)
            weights = self.dense.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    models = []
    for count in (None, 3):
        model = Late()
        model.compile("sgd")
        if count:
            kc.replicate(model, count)
        model.fit(X, Y, epochs=2, batch_size=6, shuffle=False, verbose=0)
        models.append(model.dense)
    kc.assert_in_sync(models[1])
    for one, many in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-6)


class BuiltByCall(keras.Model):
    """Has no variables before its first call."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_an_initial_value_is_not_drawn_for_samples(count):
    def built(devices):
        keras.utils.set_random_seed(0)
        model = BuiltByCall()
        model.compile("sgd", "mse")
        if devices:
            kc.replicate(model, devices=devices)
        predicted = model.predict(X, verbose=0)
        assert kc.in_sync(model)
        return predicted, *model.get_weights()

    for replicated, single in zip(built(count), built(None), strict=True):
        np.testing.assert_allclose(replicated, single, rtol=1e-5)
