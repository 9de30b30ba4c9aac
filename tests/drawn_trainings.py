"""Trains drawn programs on one device and on several, and says what differs."""

import random
import warnings

import keras
import numpy as np
import tensorflow as tf
from drawn_lot import Judged
from drawn_programs import FEATURES
from drawn_programs import HIDDEN
from drawn_programs import SIZES
from drawn_programs import TARGETS
from drawn_programs import Redraw
from drawn_programs import drawn_program
from keras import layers
from keras import optimizers
from models import gaps
from models import outcome
from models import size

import keras_conflux as kc

RTOL = 1e-6
ROUNDING = 1e-15
"""Of batch fractions, and of sums in another order."""
MOVED = 1e-10
"""By how much of its own the data of a second training on one device move."""
MOST_AMPLIFIED = 1e3
"""By how much more results may move than the data, to be compared."""
MARGIN = 10
OPTIMIZERS = {
    "sgd": lambda **options: optimizers.SGD(0.05, momentum=0.5, **options),
    "adam": lambda **options: optimizers.Adam(1e-2, epsilon=1e-2, **options),
}


class Mixing(layers.Layer):
    """Returns what a program makes of the samples."""

    def __init__(self, function):
        super().__init__(name="mixing")
        self.function = function

    def call(self, x):
        return self.function(x)


class Keeping(layers.Layer):
    """Keeps what a program makes of the samples, and may return it."""

    def __init__(self, function, form, is_used):
        super().__init__(name="keeping")
        self.function, self.form, self.is_used = function, form, is_used

    def build(self, shape):
        kept = self.function(tf.zeros((SIZES[0], *shape[1:]), tf.float64))
        self.kept = self.add_weight(
            shape=kept.shape, initializer="ones", trainable=False
        )

    def call(self, x, training=False):
        found = self.function(x)
        if self.form == "assign":
            self.kept.assign(found)
        elif self.form == "add":
            self.kept.assign_add(0.1 * found)
        else:
            self.kept.assign(0.9 * self.kept + 0.1 * found)
        if not self.is_used:
            return x
        return x * keras.ops.tanh(keras.ops.sum(self.kept))


class Kept(keras.metrics.Metric):
    """Keeps the values of a program in one of several ways."""

    def __init__(self, function, form):
        super().__init__(name="kept")
        self.function, self.form = function, form
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y, p, sample_weight=None):
        value = self.function(y, p)
        if self.form == "sum":
            self.total.assign_add(tf.reduce_sum(value))
        elif self.form == "last":
            self.total.assign(tf.reduce_mean(value))
        else:
            found = tf.reduce_max(value)
            self.total.assign(keras.ops.maximum(self.total, found))

    def result(self):
        return self.total + 0.0


class Network(keras.Model):
    """A small network, around or in front of a program."""

    def __init__(self, program):
        super().__init__()
        self.options = program.options
        self.function = program.function
        self.hidden = layers.Dense(HIDDEN, "tanh")
        self.between = None
        if program.place == "layer":
            self.between = Mixing(self.function)
        elif program.place == "state":
            self.between = Keeping(
                self.function, self.options["form"], self.options["used"]
            )
        self.dense = layers.Dense(TARGETS)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x, training=False):
        z = self.hidden(x)
        if self.between is not None:
            z = self.between(z)
        p = self.dense(z)
        if self.options.get("form") == "add_loss":
            self.add_loss(self.function(x[:, :TARGETS], p))
        return p


class OwnLoss(Network):
    """Computes its loss by the program."""

    def compute_loss(self, x=None, y=None, y_pred=None, *rest, **options):
        return self.function(y, y_pred)


class OwnStep(Network):
    """A step of the user's own, which computes something by the program."""

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, data):
        x, y = data
        site = self.options["site"]
        if site == "input":
            x = self.function(x, y)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean((y - p) ** 2)
            if site == "loss":
                loss = self.function(y, p)
        grads = tape.gradient(loss, self.trainable_weights)
        if site == "gradient":
            scale = 1 + tf.tanh(self.function(y, p))
            grads = [scale * each for each in grads]
        self.optimizer.apply(grads, self.trainable_weights)
        self.mean.update_state(self.function(y, p) if site == "metric" else p)
        logs = {"mean": self.mean.result(), "loss": loss}
        if site == "log":
            logs["drawn"] = self.function(y, p)
        return logs


class Batches(keras.callbacks.Callback):
    """Keeps the logs of each batch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({k: np.array(v) for k, v in logs.items()})


def made(program, run_eagerly):
    """Makes the model of a program, always with the same weights."""
    options = program.options
    keras.utils.set_random_seed(options["seed"])
    kinds = {"compute_loss": OwnLoss}
    kind = OwnStep if "site" in options else Network
    if program.place == "state" or program.place == "layer":
        kind = Network
    model = kinds.get(options.get("form"), kind)(program)
    model(tf.zeros((SIZES[0], FEATURES), tf.float64))
    loss, metrics = "mse", []
    if options.get("form") == "function":
        if program.place == "loss":
            loss = program.function
        else:
            metrics = [program.function]
    elif program.place == "metric" and kind is Network:
        metrics = [Kept(program.function, options["form"])]
    model.compile(
        OPTIMIZERS[options["optimizer"]](**options["of optimizer"]),
        loss,
        metrics=metrics,
        run_eagerly=run_eagerly,
        jit_compile=False,
    )
    return model


def train(program, devices=None, moved=0.0, run_eagerly=False):
    """Trains for two batches, and returns all that is left and was logged.

    Args:
        program: What was drawn.
        devices: How many replicas there are, or `None` for plain Keras.
        moved: By how much of itself each number of the data moves.
        run_eagerly: Whether plain Keras traces nothing, which takes less time.
    """
    numbers = np.random.default_rng(program.options["seed"])
    samples = SIZES[0] + program.options["last"]
    x = numbers.normal(size=(samples, FEATURES))
    y = numbers.normal(size=(samples, TARGETS))
    x *= 1 + moved * numbers.normal(size=x.shape)
    y *= 1 + moved * numbers.normal(size=y.shape)
    model = made(program, run_eagerly)
    if devices:
        kc.replicate(model, devices)
    batches = Batches()
    history = model.fit(
        x,
        y,
        batch_size=SIZES[0],
        shuffle=False,
        verbose=0,
        callbacks=[batches],
    )
    if devices:
        kc.assert_in_sync(model)
    return outcome(model, history, batches.logs)


def expected_of(program):
    """Trains with plain Keras on one device.

    Returns:
        What it leaves, and how much each part of it may differ.

    Raises:
        Redraw: If it cannot be trained, or roundings are amplified too much.
    """
    try:
        found = train(program, run_eagerly=True)
        other = train(program, moved=MOVED, run_eagerly=True)
    except Exception as error:
        raise Redraw("plain Keras raises") from error
    values = [each for each in found.values() if each.dtype.kind == "f"]
    if not all(np.all(np.isfinite(each)) for each in values):
        raise Redraw("not finite")
    largest = max(map(size, values))
    if largest > 1e4 or not _has_learnt(found, program):
        raise Redraw("diverges")
    tolerances = {}
    for name, gap in gaps(found, other).items():
        amplified = gap / MOVED
        if amplified > MOST_AMPLIFIED * max(size(found[name]), 1e-3):
            raise Redraw("ill-conditioned")
        tolerances[name] = (
            RTOL * max(size(found[name]), 1e-6) + MARGIN * amplified * ROUNDING
        )
    return found, tolerances


def _has_learnt(found, program):
    """Whether the training has changed weights."""
    before = made(program, True).get_weights()
    after = list(found.values())[: len(before)]
    return any(
        np.max(np.abs(one - other)) > 1e-6
        for one, other in zip(before, after, strict=True)
    )


def judge(program):
    """Compares the training of a program with that of one device.

    Returns:
        A verdict, and what to read of it.

    Raises:
        Redraw: If there is nothing to compare with.
    """
    expected, tolerances = expected_of(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = train(program, program.options["devices"])
        except kc.ConfluxError as error:
            return _warned(program, f"{type(error).__name__}: {error}")
        except Exception as error:
            _assert_plain_keras_traces(program)
            got = error
    said = [
        str(each.message)
        for each in caught
        if issubclass(each.category, kc.ConfluxWarning)
    ]
    if said:
        return _warned(program, said[0])
    if isinstance(got, Exception):
        return "crash", f"{type(got).__name__}: {str(got)[-400:]}"
    found = gaps(expected, got)
    wrong = {
        name: f"{gap:.2g} of {size(expected[name]):.2g}"
        for name, gap in found.items()
        if not gap <= tolerances[name]
    }
    if wrong:
        _assert_plain_keras_agrees(program, expected, tolerances)
        return "WRONG", str(dict(list(wrong.items())[:6]))
    return "equal", ""


def _warned(program, said):
    if program.mixes:
        return "warned", said
    _assert_plain_keras_traces(program)
    return "FALSE ALARM", said


def _assert_plain_keras_traces(program):
    try:
        return train(program)
    except Exception as error:
        raise Redraw("plain Keras cannot trace") from error


def _assert_plain_keras_agrees(program, expected, tolerances):
    """A graph of plain Keras computes what it computes without."""
    found = gaps(expected, _assert_plain_keras_traces(program))
    if any(gap > tolerances[name] for name, gap in found.items()):
        raise Redraw("plain Keras differs from itself")


def verdict_of(number, most=3):
    """Draws the program of a number, and judges it.

    Args:
        number: From which all follows.
        most: How many devices there are.
    """
    rng = random.Random(number)
    reasons = []
    while True:
        try:
            program = drawn_program(rng, most)
            verdict, said = judge(program)
        except Redraw as reason:
            reasons.append(str(reason))
            continue
        kind = program.options["kind"]
        return Judged(number, verdict, kind, str(program), said, tuple(reasons))
