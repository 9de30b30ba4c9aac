"""A step sees what its caller keeps by thread, as on one device."""

import contextvars
import threading

import keras
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from models import regression

import keras_conflux as kc

X, Y = regression(24)
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("variable", default="missing")


class Looking(keras.Sequential):
    """Notes what it sees while its step is traced."""

    def __init__(self, look, **options):
        super().__init__([keras.Input((8,)), keras.layers.Dense(1)])
        self.look, self.seen = look, []
        self.compile("sgd", "mse", jit_compile=False, **options)

    def train_step(self, data):
        self.seen.append(self.look())
        return super().train_step(data)


def seen(look, **options):
    model = kc.replicate(Looking(look, **options), MANY)
    model.fit(X, Y, batch_size=24, verbose=0)
    return model.seen


def test_what_is_kept_by_thread():
    LOCAL.value = "there"
    assert seen(lambda: getattr(LOCAL, "value", None)) == ["there"] * MANY


@pytest.mark.parametrize("eager", [False, True])
def test_context_variables(eager):
    token = VARIABLE.set("there")
    try:
        times = 1 if eager else MANY
        assert seen(VARIABLE.get, run_eagerly=eager) == ["there"] * times
    finally:
        VARIABLE.reset(token)


def test_numerics_are_checked_in_a_step():
    class Logarithm(keras.layers.Layer):
        def call(self, x):
            return x + 0 * keras.ops.log(x - x - 1.0)

    model = keras.Sequential([keras.Input((8,)), Logarithm()])
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, MANY)
    tf.debugging.enable_check_numerics()
    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match="Log"):
            model.evaluate(X, X, verbose=0)
    finally:
        tf.debugging.disable_check_numerics()


def test_replicas_pause_where_the_user_merges():
    """In the midst of a step, as `tf.distribute` documents it."""

    def total(strategy, values):
        return strategy.reduce("sum", values, axis=None)

    class Merging(keras.Sequential):
        def train_step(self, data):
            context = tf.distribute.get_replica_context()
            logs = super().train_step(data)
            size = tf.shape(data[0])[0]
            logs["size"] = context.merge_call(total, args=(size,))
            rows = context.all_gather(data[0], axis=0)
            logs["rows"] = tf.shape(rows)[0]
            return logs

    model = Merging([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((X[:7], Y[:7])).batch(7)
    history = kc.replicate(model, MANY).fit(data, verbose=0)
    assert history.history["rows"] == history.history["size"] == [7]


@several
def test_replicas_that_merge_different_numbers_of_times():
    @kc.withdevices(devices=MANY)
    def run(first):
        context = tf.distribute.get_replica_context()
        if (kc.replica().index == 0) is first:
            context.merge_call(lambda strategy: None)

    for first in (True, False):
        with pytest.raises(RuntimeError, match="different number"):
            run(first)
