"""Trains as one of several processes, of which process 1 differs each time.

`process_differences.py [CASE ...]` prints a line for each case, or for all: its
name, and the error or what else has come of it.
"""

import os
import sys
import warnings

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_conflux as kc

kc.initialize(heartbeat=5)

from process_cases import wide

is_wrong = kc.process_index() == 1
X = np.random.default_rng(0).normal(size=(29, 8)).astype("float32")
Y = X[:, :1]


def made(
    activation="relu",
    loss="mse",
    regularizer=None,
    rate=0.3,
    is_frozen=False,
    optimizer="sgd",
    **settings,
):
    keras.utils.set_random_seed(1)
    first = layers.Dense(
        5, activation, kernel_regularizer=regularizer, name="first"
    )
    first.trainable = not is_frozen
    last = [layers.Dropout(rate), layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input((8,)), first, *last], name="model")
    optimizer = keras.optimizers.get(optimizer)
    optimizer.name = "optimizer"
    for name, value in settings.items():
        setattr(optimizer, name, value)
    model.compile(optimizer, loss, metrics=["mae"], jit_compile=False)
    return kc.replicate(model, devices=1)


# What process 1 makes otherwise.
OTHERS = {
    "activation": {"activation": "tanh"},
    "loss": {"loss": "mae"},
    "regularizer": {"regularizer": "l2"},
    "constant": {"rate": 0.4},
    "frozen": {"is_frozen": True},
    "setting": {"clipnorm": 1.0},
    "first rate": {"learning_rate": 0.2},
    "nothing": {},
}


def scaled(model):
    model.set_weights([1.01 * weight for weight in model.get_weights()])


# What process 1 does in the middle of the second of three epochs.
CHANGES = {
    "rate": lambda model: setattr(model.optimizer, "learning_rate", 0.2),
    "set_weights": scaled,
    "one weight": lambda model: model.layers[-1].bias.assign_add([0.1]),
    "clipnorm": lambda model: setattr(model.optimizer, "clipnorm", 1.0),
    "trainable": lambda model: setattr(model.layers[0], "trainable", False),
    "same weights": lambda model: model.set_weights(model.get_weights()),
}


class Change(keras.callbacks.Callback):
    """Calls a function with the model in one step of the second epoch."""

    epoch = 0

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1):
            self.change(self.model)


class AtEnd(keras.callbacks.Callback):
    """Assigns a weight when all epochs have ended."""

    def on_train_end(self, logs=None):
        CHANGES["one weight"](self.model)


def trained(model, *callbacks):
    options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=list(callbacks), **options)
    return "trained"


def shown_after(change, call):
    model = made()
    trained(model)
    if is_wrong:
        CHANGES[change](model)
    getattr(model, call)(*([X, Y] if call == "evaluate" else [X]), verbose=0)
    return "shown"


def stepped_after(change):
    """Changes a model between two calls of `train_on_batch`."""
    model = made()
    model.train_on_batch(X[:8], Y[:8])
    if is_wrong:
        CHANGES[change](model)
    model.train_on_batch(X[:8], Y[:8])
    return "trained"


def looped_after(change):
    """Changes a model before a loop of its own."""
    model = made()
    if is_wrong:
        CHANGES[change](model)

    @kc.withdevices(devices=1)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        weights = model.trainable_variables
        gradients = kc.allreduce("mean", tape.gradient(loss, weights))
        model.optimizer.apply(gradients, weights)
        return loss

    step(*kc.split((X[:8], Y[:8])))
    return "trained"


def looped_over(x, ahead):
    count = kc.withdevices(lambda x: kc.allreduce("sum", len(x)), devices=1)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
    for _ in range(2):
        batches = kc.distribute(dataset, devices=1, ahead=ahead)
        counts = [int(count(batch)[0]) for batch in batches]
    return counts


def split_over(x):
    count = kc.withdevices(lambda x: kc.allreduce("sum", len(x)), devices=1)
    return [int(count(kc.split(x, devices=1))[0])]


def trained_in_parts(differ):
    """Trains where each device has a part of a weight."""
    model = wide("sgd")
    kc.replicate(model, devices=1, shard="weights")
    if is_wrong:
        differ(model.layers[2].kernel)
    model.fit(X, Y, batch_size=8, verbose=0)
    return "trained"


def trained_with_table(order):
    words = layers.StringLookup(vocabulary=[*order], output_mode="one_hot")
    kinds = keras.Input((1,), dtype="string")
    outputs = layers.Dense(1)(words(kinds))
    model = keras.Model(kinds, outputs, name="model")
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, devices=1)
    x = tf.constant([["a"], ["b"]] * 8)
    model.fit(x, Y[:16], batch_size=8, verbose=0)
    return "trained"


def shown_between_steps():
    """Warns of nothing that this package writes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        model = made()
        model.train_on_batch(X[:8], Y[:8])
        model.predict_on_batch(X[:8])
    return "shown"


class Scaled(layers.Layer):
    """Reads a variable of TensorFlow's own, and perhaps writes it."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes
        self.scale = tf.Variable(1.0, trainable=False, name="scale")

    def call(self, x):
        scale = self.scale.assign_add(1.0) if self.writes else self.scale
        return tf.cond(scale > 1.5, lambda: 2 * x, lambda: x)


def trained_with_plain_variable(writes):
    model = made()
    kc.unreplicate(model)
    scaled = Scaled(writes)
    model = keras.Sequential([scaled, *model.layers], name="model")
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, devices=1)
    change = Change(lambda model: scaled.scale.assign_add(1.0))
    return trained(model, *([change] if is_wrong else []))


def stepped(function):
    step = kc.withdevices(function, devices=1)
    return [float(result) for result in step(tf.constant(2.0))]


def squared(x):
    return kc.allreduce("sum", x * x)


def doubled(x):
    return kc.allreduce("sum", x + x)


def scaled_by_rank(x):
    return kc.allreduce("sum", x * kc.replica().index)


def averaged_by_rank(x):
    x = x * kc.replica().index
    return kc.allreduce("max" if is_wrong else "sum", x)


doubled.__qualname__ = squared.__qualname__ = "squared"
CASES = {
    f"another {name}": lambda other=other: trained(
        made(**(other if is_wrong else {}))
    )
    for name, other in OTHERS.items()
}
CASES |= {
    f"a change of {name}": lambda change=change: trained(
        made(), *([Change(change)] if is_wrong else [])
    )
    for name, change in CHANGES.items()
}
CASES |= {
    "a change at the end": lambda: trained(made(), *([AtEnd()] * is_wrong)),
    "evaluate after a change": lambda: shown_after("set_weights", "evaluate"),
    "predict after a change": lambda: shown_after("one weight", "predict"),
    "predict after none": lambda: shown_after("same weights", "predict"),
    "a step after a change": lambda: stepped_after("one weight"),
    "a step after a rate": lambda: stepped_after("rate"),
    "a step after none": lambda: stepped_after("same weights"),
    "a loop after a change": lambda: looped_after("one weight"),
    "a loop after a rate": lambda: looped_after("rate"),
    "a loop after none": lambda: looped_after("same weights"),
    "a loop over parts": lambda: looped_over(kc.shard(X), ahead=0),
    "a loop that splits its rows": lambda: split_over(kc.shard(X[:16])),
    "a loop that splits the same": lambda: split_over(X[:16]),
    "a loop ahead over others": lambda: looped_over(X[is_wrong:], ahead=2),
    "a loop over another second batch": lambda: looped_over(
        np.concatenate([X[:8], X[9:10], X[9:]]) if is_wrong else X, ahead=0
    ),
    "a loop over the same": lambda: looped_over(X, ahead=0),
    "a loop ahead over the same": lambda: looped_over(X, ahead=2),
    "a part of another weight": lambda: trained_in_parts(
        lambda kernel: kernel.assign(tf.ones(kernel.shape))
    ),
    "a part of an added weight": lambda: trained_in_parts(
        lambda kernel: kernel.assign_add(tf.ones(kernel.shape))
    ),
    "a weight read alone": lambda: trained_in_parts(lambda x: x.numpy()),
    "a table": lambda: trained_with_table("ba" if is_wrong else "ab"),
    "the same table": lambda: trained_with_table("ab"),
    "predict between steps": shown_between_steps,
    "a tf.Variable": lambda: trained_with_plain_variable(writes=False),
    "a tf.Variable of each": lambda: trained_with_plain_variable(writes=True),
    "another function": lambda: stepped(doubled if is_wrong else squared),
    "the same function": lambda: stepped(squared),
    "the rank in a function": lambda: stepped(scaled_by_rank),
    "collectives by rank": lambda: stepped(averaged_by_rank),
}
for name in sys.argv[1:] or CASES:
    try:
        found = CASES[name]()
    except kc.ConfluxError as error:
        found = f"{type(error).__name__}: {error}"
    print(f"{name}: {found}", flush=True)
kc.barrier()
