"""Trains drawn programs on one device and on several, and says what differs."""

import random
import warnings

import keras
import numpy as np
import tensorflow as tf
from drawn_lot import Judged
from drawn_programs import FEATURES
from drawn_programs import HIDDEN
from drawn_programs import OF_STEPS
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


def is_chosen(number):
    """Whether a branch is taken: by a small change of a number, another one."""
    return tf.sin(9 * number) > 0


def choose(by, number, yes):
    """Runs a branch, or nothing, by a number that depends on samples."""
    zero = tf.zeros([], tf.float64)
    if by == "ops":
        return keras.ops.cond(is_chosen(number), yes, lambda: zero)
    if by == "case":
        index = tf.cast(is_chosen(number), "int32")
        return tf.switch_case(index, [lambda: zero, yes])
    if by == "nested":
        return tf.cond(
            is_chosen(number + 1),
            lambda: choose("cond", number, yes),
            lambda: zero,
        )
    return tf.cond(is_chosen(number), yes, lambda: zero)


@tf.function
def choose_by_if(number, yes):
    """Runs a branch, or nothing, in a function that autograph has written."""
    found = tf.zeros([], tf.float64)
    if is_chosen(number):
        found = yes()
    return found


class Slopes(layers.Layer):
    """Has a gradient that a program computes.

    Args:
        function: Returns derivatives, of derivatives and inputs.
        forward: What it computes of the inputs.
    """

    def __init__(self, function, forward):
        super().__init__(name="slopes")
        self.function = function
        self.forward = {"sign": tf.sign, "tanh": tf.tanh}.get(
            forward, tf.identity
        )

    def call(self, x):
        @tf.custom_gradient
        def with_slope(x):
            return self.forward(x), lambda d: self.function(d, x)

        return with_slope(x)


class Mixing(layers.Layer):
    """Returns what a program makes of the samples."""

    def __init__(self, function):
        super().__init__(name="mixing")
        self.function = function

    def call(self, x):
        return self.function(x)


class Keeping(layers.Layer):
    """Keeps what a program makes of the samples, and may return it."""

    def __init__(self, function, form, is_used, by=None):
        super().__init__(name="keeping")
        self.function, self.form, self.is_used = function, form, is_used
        self.by = by

    def build(self, shape):
        kept = self.function(tf.zeros((SIZES[0], *shape[1:]), tf.float64))
        self.kept = self.add_weight(
            shape=kept.shape, initializer="ones", trainable=False
        )

    def call(self, x, training=False):
        found = self.function(x)
        if self.by is None:
            self.keep(found)
        else:
            number = tf.reduce_mean(found)
            choose(self.by, number, lambda: self.keep(found))
        if not self.is_used:
            return x
        return x * keras.ops.tanh(keras.ops.sum(self.kept))

    def keep(self, found):
        if self.form == "assign":
            self.kept.assign(found)
        elif self.form == "add":
            self.kept.assign_add(0.1 * found)
        else:
            self.kept.assign(0.9 * self.kept + 0.1 * found)
        return tf.zeros([], tf.float64)


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
                self.function,
                self.options["form"],
                self.options["used"],
                self.options.get("by"),
            )
        elif self.options.get("form") == "layer":
            self.between = Slopes(self.function, self.options["forward"])
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


class OwnSlope(Network):
    """Computes its loss of predictions that have a gradient by the program."""

    def __init__(self, program):
        super().__init__(program)
        self.dense = layers.Dense(HIDDEN)
        self.slopes = Slopes(self.function, self.options["forward"]).call

    def compute_loss(self, x=None, y=None, y_pred=None, *rest, **options):
        errors = (self.slopes(y_pred) - x[:, :HIDDEN]) ** 2
        form = self.options["form"]
        if form == "rows":
            return tf.reduce_mean(errors, 1)
        return (tf.reduce_sum if form == "sum" else tf.reduce_mean)(errors)


class OwnBranch(Network):
    """A step that chooses what it does by a number of the program."""

    def __init__(self, program):
        super().__init__(program)
        self.by, self.form = self.options["by"], self.options["form"]
        self.kept = self.add_weight(initializer="ones", trainable=False)
        if self.by in ("function", "nested"):
            chosen = "cond" if self.by == "function" else "nested"
            self.choose = tf.function(
                lambda number, yes: choose(chosen, number, yes)
            )
        elif self.by == "if":
            self.choose = choose_by_if
        else:
            self.choose = lambda number, yes: choose(self.by, number, yes)

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean((y - p) ** 2)
            number = self.function(y, p)
            if number.shape.rank:
                number = tf.reduce_mean(number)
            if self.form == "loss":
                loss += self.choose(number, lambda: tf.math.reduce_std(y - p))
        grads = tape.gradient(loss, self.trainable_weights)

        def apply():
            self.optimizer.apply(grads, self.trainable_weights)
            return tf.zeros([], tf.float64)

        if self.form != "optimizer":
            apply()
        if self.form != "loss":
            self.choose(
                number,
                apply
                if self.form == "optimizer"
                else lambda: self.keep(number, p),
            )
        return {"mean": self.mean.result(), "loss": loss}

    def keep(self, number, p):
        if self.form == "set":
            self.kept.assign(number)
        elif self.form == "add":
            self.kept.assign_add(0.1 * number)
        elif self.form == "moving":
            self.kept.assign(0.9 * self.kept + 0.1 * tf.reduce_mean(p))
        elif self.form == "double":
            self.kept.assign(2 * self.kept)
        elif self.form == "count":
            self.kept.assign_add(tf.cast(tf.shape(p)[0], "float64"))
        else:
            self.mean.update_state(number if self.form == "metric" else p)
        return tf.zeros([], tf.float64)


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
    model = _kind(program)(program)
    model(tf.zeros((SIZES[0], FEATURES), tf.float64))
    loss, metrics = "mse", []
    if options.get("form") == "function":
        if program.place == "loss":
            loss = program.function
        else:
            metrics = [program.function]
    elif program.place == "metric" and type(model) is Network:
        metrics = [Kept(program.function, options["form"])]
    model.compile(
        OPTIMIZERS[options["optimizer"]](**options["of optimizer"]),
        loss,
        metrics=metrics,
        run_eagerly=run_eagerly,
        jit_compile=False,
    )
    model.optimizer.build(model.trainable_weights)
    return model


def _kind(program):
    """Returns the class of the model of a program."""
    form = program.options.get("form")
    if form == "compute_loss":
        return OwnLoss
    if program.place == "branch":
        return OwnBranch
    if program.place == "slope":
        return Network if form == "layer" else OwnSlope
    in_step = "site" in program.options
    return OwnStep if in_step and program.place in OF_STEPS else Network


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
