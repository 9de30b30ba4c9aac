"""Models that are used inside the steps of others, on the same devices."""

import concurrent.futures
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc

X, Y = regression(22)
FIT = dict(batch_size=8, epochs=2, shuffle=False, verbose=0)


class Taught(keras.Sequential):
    """Learns from what another model says in the midst of its step."""

    def __init__(self, ask):
        super().__init__([keras.Input((8,)), keras.layers.Dense(1)])
        self.ask = ask
        self.compile("sgd", "mse", jit_compile=False)

    def train_step(self, data):
        x, _ = data[:2]
        y = tf.py_function(self.ask, [x], tf.float32)
        return super().train_step((x, tf.ensure_shape(y, [None, 1])))


def pair(ask):
    """Returns a model on one device and one on many, with their teachers."""
    models = []
    for replicated in (False, True):
        keras.utils.set_random_seed(0)
        teacher = dense("sgd")
        model = Taught(lambda x, of=teacher: ask(of, x.numpy()))
        if replicated:
            kc.replicate(teacher, MANY)
            kc.replicate(model, MANY)
        models.append(model)
    return models


def fit(model):
    """Trains in a thread, so that a test that fails does not wait forever."""
    results = []

    def run():
        try:
            results.append(model.fit(X, Y, **FIT))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert results, "it waits"
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


by_python = pytest.mark.filterwarnings("ignore:.*as of Python code")


@pytest.mark.long
@by_python
def test_a_step_asks_another_model_for_predictions():
    def ask(teacher, x):
        return teacher.predict(x, verbose=0)

    one, many = pair(ask)
    assert_same_training(one, many, fit(one), fit(many))


@pytest.mark.long
def test_an_eager_step_asks_another_model_for_predictions():
    """Plain Keras cannot: one device is asked in a step that it has traced."""

    def ask(teacher, x):
        return teacher.predict(x, verbose=0)

    one, many = pair(ask)
    many.compile("sgd", "mse", run_eagerly=True)
    assert_same_training(one, many, fit(one), fit(many))


class Slow(keras.layers.Layer):
    """Takes long to trace, so that threads trace it at once."""

    def call(self, x):
        time.sleep(0.05)
        return 2 * x


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_threads_ask_for_predictions_at_once(run_eagerly):
    layers = [keras.Input((8,)), Slow(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(jit_compile=False, run_eagerly=run_eagerly)
    kc.replicate(model, MANY)
    model.make_predict_function()

    def ask(delay):
        time.sleep(delay)  # one begins while another is at a later replica
        return model.predict(X, verbose=0)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = list(threads.map(ask, [0, 0.07, 0.14, 0.21]))
    weights = kc.unreplicate(model).get_weights()
    for result in results:
        np.testing.assert_allclose(result, 2 * X @ weights[0], rtol=1e-5)


@pytest.mark.long
@by_python
def test_a_step_that_trains_another_model_is_told_so():
    one_at_a_time = threading.Lock()  # as Keras' own methods want it

    def ask(teacher, x):
        with one_at_a_time:
            teacher.train_on_batch(x, x[:, :1])
        return teacher.predict(x, verbose=0)

    many = pair(ask)[1]
    with pytest.raises(tf.errors.OpError, match="predict` exchanges nothing"):
        fit(many)
    many.ask = lambda x: np.zeros((len(x), 1), "float32")
    many.make_train_function(force=True)
    fit(many)  # nothing is left behind


@pytest.mark.long
def test_a_generator_trains_another_model_meanwhile():
    other = kc.replicate(dense("sgd"), MANY)

    def batches():
        for _ in range(6):
            other.train_on_batch(X, Y)
            yield X, Y

    model = kc.replicate(dense("sgd"), MANY)
    model.fit(batches(), steps_per_epoch=6, verbose=0)
    assert int(other.optimizer.iterations) == 6


@pytest.mark.long
@pytest.mark.parametrize("when", ["on_train_batch_end", "on_epoch_end"])
def test_a_callback_trains_another_model(when):
    other = kc.replicate(dense("sgd"), MANY)
    callback = keras.callbacks.LambdaCallback(
        **{when: lambda *_, logs=None: other.fit(X, Y, verbose=0)}
    )
    one, many = dense(), kc.replicate(dense(), MANY)
    got = many.fit(X, Y, callbacks=[callback], **FIT)
    assert_same_training(one, many, one.fit(X, Y, **FIT), got)
