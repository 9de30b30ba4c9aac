"""What no rule tells is tried out, or a warning names it: as on one device."""

import collections
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from keras import layers
from models import assert_same_training
from models import regression

import keras_conflux as kc
from keras_conflux._batch_analysis import trial
from keras_conflux._batch_analysis import trial_program

X, Y = regression(22)
FIT = dict(batch_size=8, epochs=2, shuffle=False, verbose=0)
LABELS = np.random.default_rng(0).integers(1, 4, (22, 3))
STEPS = np.random.default_rng(1).integers(2, 4, 22)
"""The lengths of the labels."""


class Equilibrium(layers.Layer):
    """Goes to a fixed point, to which random weights do not lead."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8, kernel_initializer="zeros")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        def closer(y, gap):
            new = tf.tanh(self.dense(y) + x)
            return new, tf.reduce_max(tf.abs(new - y))

        gap = tf.constant(1.0)
        return tf.while_loop(
            lambda _, gap: gap > 1e-6, closer, (tf.zeros_like(x), gap)
        )[0]


@several
def test_a_loop_that_does_not_end_in_a_trial_warns(monkeypatch):
    monkeypatch.setattr(trial_program, "_MAX_TIME", 500)
    model = keras.Sequential([layers.Dense(8), Equilibrium(), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, MANY)
    with pytest.warns(kc.ConfluxWarning, match="equilibrium"):
        model.predict(X, verbose=0)


class OwnStep(keras.Sequential):
    """Trains by a loss of predictions and targets."""

    def __init__(self, loss, inside):
        super().__init__(inside)
        self.own_loss = loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def trained(build, data, **options):
    """Returns a model on one device and one on many, and their histories."""
    found = []
    for devices in (None, MANY):
        keras.utils.set_random_seed(0)
        model = build()
        model.compile(keras.optimizers.SGD(0.05), **options)
        if devices:
            kc.replicate(model, devices)
        found.append((model, model.fit(*data, **FIT)))
    (one, first), (many, second) = found
    return one, many, first, second


def assert_equal(build, data=(X, Y), **options):
    assert_same_training(*trained(build, data, **options), rtol=1e-4)


def _paths(y, p):
    """Returns what each sample's sequence costs, as in speech recognition."""
    return tf.nn.ctc_loss(
        y["labels"],
        p,
        y["lengths"],
        tf.fill([tf.shape(p)[0]], 6),
        logits_time_major=False,
        blank_index=0,
    )


SEQUENCES = {
    "mean": lambda y, p: tf.reduce_mean(_paths(y, p)),
    "sum": lambda y, p: tf.reduce_sum(_paths(y, p)) / 10,
    "ratio": lambda y, p: (
        tf.reduce_sum(_paths(y, p))
        / tf.cast(tf.reduce_sum(y["lengths"]), tf.float32)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SEQUENCES)
def test_losses_of_sequences(name):
    def build():
        inside = [keras.Input((8,)), layers.Dense(24), layers.Reshape((6, 4))]
        return OwnStep(SEQUENCES[name], inside)

    targets = {"labels": LABELS, "lengths": STEPS}
    assert_equal(build, (X, targets), jit_compile=False)


class Paths(layers.Layer):
    """Adds a loss that no rule can read."""

    def call(self, x, labels, lengths):
        found = _paths({"labels": labels, "lengths": lengths}, x)
        self.add_loss(tf.reduce_sum(found) / 10)
        return layers.Flatten()(x)


@pytest.mark.long
@pytest.mark.sampled(2)
def test_a_loss_that_a_layer_adds_as_a_sum():
    def build():
        x = keras.Input((8,))
        labels = keras.Input((3,), dtype="int32")
        lengths = keras.Input((), dtype="int32")
        p = layers.Reshape((6, 4))(layers.Dense(24)(x))
        p = Paths()(p, labels, lengths)
        return keras.Model([x, labels, lengths], layers.Dense(1)(p))

    given = X, LABELS.astype("int32"), STEPS.astype("int32")
    assert_equal(build, (given, Y), loss="mse", jit_compile=False)


@pytest.mark.long
def test_a_loss_of_the_lengths_of_ragged_samples():
    def loss(y, p):
        lengths = tf.cast(y.row_lengths(), tf.float32)
        return tf.reduce_mean((p[:, 0] - lengths) ** 2) ** 0.5

    rows = tf.RaggedTensor.from_row_lengths(np.arange(60.0), [3] * 16 + [2] * 6)
    data = tf.data.Dataset.from_tensor_slices((X, rows)).batch(8)
    found = []
    for devices in (None, MANY):
        keras.utils.set_random_seed(0)
        model = OwnStep(loss, [keras.Input((8,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), jit_compile=False)
        if devices:
            kc.replicate(model, devices)
        found.append(model.fit(data, verbose=0).history["loss"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def _ranked(y):
    return (np.argsort(np.argsort(y[:, 0])) / len(y)).astype(y.dtype)


def _ranks(y):
    ranks = tf.numpy_function(_ranked, [y], y.dtype)
    return tf.ensure_shape(ranks, [None])


def _highest(y):
    found = tf.numpy_function(lambda a: np.max(a), [y], y.dtype)
    return tf.ensure_shape(found, [])


PYTHON = {
    "one number": lambda y, p: tf.reduce_mean(
        _ranks(y)[:, None] * (y - p) ** 2
    ),
    "one for each sample": lambda y, p: (
        _ranks(y) * tf.reduce_mean((y - p) ** 2, 1)
    ),
    "by a number": lambda y, p: tf.reduce_mean(
        tf.minimum(_highest(y), tf.abs(y - p))
    ),
}


def warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [
        str(each.message)
        for each in caught
        if issubclass(each.category, kc.ConfluxWarning)
    ]


@several
@pytest.mark.parametrize("name", PYTHON)
def test_python_code_in_a_loss_warns_once(name):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
    model.compile("sgd", PYTHON[name], jit_compile=False)
    kc.replicate(model, MANY)
    (text,) = warned(lambda: model.fit(X, Y, **FIT))
    assert "the graph does not show how" in text
    assert "Python code" in text


@several
def test_python_code_in_a_metric_warns_once():
    def highest(y, p):
        return _highest(tf.abs(y - p))

    model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[highest], jit_compile=False)
    kc.replicate(model, MANY)
    (text,) = warned(lambda: model.evaluate(X, Y, batch_size=8, verbose=0))
    assert "'highest'" in text


class InFunctions(OwnStep):
    """Differentiates in a `tf.function` of its own."""

    def __init__(self, loss):
        super().__init__(loss, [keras.Input((8,)), layers.Dense(1)])

        @tf.function
        def scaled(a, b, *, scale=1.0):
            return scale * self.own_loss(a, b)

        @tf.function
        def gradients(x, y):
            with tf.GradientTape() as tape:
                loss = scaled(y, self(x), scale=2.0)
            return tape.gradient(loss, self.trainable_variables), loss

        self.gradients = gradients

    def train_step(self, data):
        gradients, loss = self.gradients(*data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


FUNCTIONS = {
    "mean": lambda a, b: tf.reduce_mean((a - b) ** 2),
    "sum": lambda a, b: 0.1 * tf.reduce_sum((a - b) ** 2),
    "ratio": lambda a, b: tf.reduce_sum((a - b) ** 2) / tf.reduce_sum(a**2),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*which the step returns")
def test_gradients_that_a_function_computes(name):
    one, many, *_ = trained(lambda: InFunctions(FUNCTIONS[name]), (X, Y))
    for a, b in zip(one.get_weights(), many.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.filterwarnings("error::keras_conflux.ConfluxWarning")
def test_a_function_that_is_given_mixed_samples():
    class Model(InFunctions):
        def train_step(self, data):
            x, y = data
            logs = super().train_step(data)
            for mixed in (x - tf.reduce_mean(x, 0), tf.sort(x, 0)):
                gradients, _ = self.gradients(mixed, y)
                self.optimizer.apply(gradients, self.trainable_variables)
            return logs

    one, many, *_ = trained(lambda: Model(FUNCTIONS["mean"]), (X, Y))
    for a, b in zip(one.get_weights(), many.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-7)
    kc.assert_in_sync(many)


def test_a_function_that_is_kept_and_writes():
    """The last batch has another size, so the step is traced twice."""

    class Model(OwnStep):
        def __init__(self):
            super().__init__(
                FUNCTIONS["mean"], [keras.Input((8,)), layers.Dense(1)]
            )
            self.kept = self.add_weight(shape=(), trainable=False)
            self.keep = tf.function(
                lambda x: self.kept.assign(tf.sqrt(tf.reduce_mean(x**2)))
            )

        def train_step(self, data):
            self.keep(data[0])
            return super().train_step(data)

    one, many, *_ = trained(Model, (X, Y))
    np.testing.assert_allclose(many.kept, one.kept, rtol=1e-6)
    kc.assert_in_sync(many)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_concrete_function_reads_what_was(is_kept):
    class Model(OwnStep):
        def train_step(self, data):
            self.concrete(data[0])
            return super().train_step(data)

    model = Model(FUNCTIONS["mean"], [keras.Input((8,)), layers.Dense(1)])
    model.compile("sgd", jit_compile=False)
    kept = [variable.value for variable in model.variables if is_kept]
    model.concrete = tf.function(model.__call__).get_concrete_function(
        tf.TensorSpec((None, 8))
    )
    kc.replicate(model, MANY)
    with pytest.raises(kc.StrategyError, match="calls a concrete function"):
        model.fit(X, Y, **FIT)
    del kept


@several
def test_a_tensor_is_tried_out_once(monkeypatch):
    tried = []

    class Program(trial.TrialProgram):
        def __init__(self, output, kinds, *args, **options):
            tried.append((kinds.graph, output.name))
            super().__init__(output, kinds, *args, **options)

    monkeypatch.setattr(trial, "TrialProgram", Program)

    class Model(OwnStep):
        def train_step(self, data):
            found = PYTHON["by a number"](*data)
            logs = super().train_step(data)
            for name in "ab":
                metric = getattr(self, name)
                metric.update_state(found)
            return logs | {"found": found}

    model = Model(FUNCTIONS["mean"], [keras.Input((8,)), layers.Dense(8)])
    model.a, model.b = (keras.metrics.Mean(name=name) for name in "ab")
    model.compile("sgd", jit_compile=False)
    kc.replicate(model, 2)
    warned(lambda: model.fit(X, X, **FIT))
    assert tried
    times = collections.Counter((id(graph), name) for graph, name in tried)
    assert max(times.values()) <= 2  # as rows, and with what follows from them
