"""Rows of sparse gradients are those that one device has, as often as there.

On GPUs sparse gradients are made dense, and rows that repeat are added up
before an optimizer sees them.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from keras import layers
from keras import ops
from models import assert_same_training

import keras_conflux as kc

pytestmark = pytest.mark.skipif(
    ON_GPU or MANY < 2, reason="needs two devices, which are no GPUs"
)
LENGTH, ROWS, WIDTH = 5, 7, 3
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, ROWS, (22, LENGTH))
TARGETS = RNG.normal(size=(22, 1)).astype("float32")
DENSE = RNG.normal(size=(22, ROWS)).astype("float32") * (
    RNG.uniform(size=(22, ROWS)) < 0.4
)
SPARSE = tf.sparse.from_dense(DENSE)
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.02),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
}


class Table(layers.Layer):
    """Looks rows of a table up, as `look_up(table, inputs)` says."""

    def __init__(self, look_up):
        super().__init__()
        self.look_up = look_up

    def build(self, shape):
        self.table = self.add_weight(shape=(ROWS, WIDTH), initializer="normal")

    def call(self, x):
        return self.look_up(self.table.value, x)


class Positions(layers.Layer):
    """Adds the embeddings of tokens and of their positions."""

    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(ROWS, WIDTH)
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))


class OneTable(layers.Layer):
    """Looks tokens and positions up in one table."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(ROWS, WIDTH)

    def call(self, x):
        return self.table(x) + self.table(ops.arange(LENGTH))


class Tied(layers.Layer):
    """Uses a table as a matrix, too."""

    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(ROWS, WIDTH)

    def call(self, x):
        return ops.matmul(self.tokens(x), ops.transpose(self.tokens.embeddings))


def of_tokens(*parts):
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = inputs
    for part in parts:
        x = part(x)
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(1)(x)), TOKENS


def of_open_length():
    inputs = keras.Input((None,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(Positions()(inputs))
    return keras.Model(inputs, layers.Dense(1)(x)), TOKENS


def unique_rows(table, ids):
    rows, places = tf.unique(tf.reshape(ids, [-1]))
    return tf.reshape(
        tf.gather(tf.gather(table, rows), places), [-1, LENGTH, WIDTH]
    )


def unique_beside_plain(table, ids):
    return unique_rows(table, ids) + tf.gather(table, ids)


def unique_shifted(table, ids):
    rows, places = tf.unique(tf.reshape(ids, [-1]) - 1)
    return tf.reshape(
        tf.gather(tf.gather(table, rows + 1), places), [-1, LENGTH, WIDTH]
    )


def unique_in_function(table, ids):
    return tf.function(lambda: unique_rows(table, ids))()


def unique_by_keras(table, ids):
    rows, places = tf.unique(tf.reshape(ids, [-1]))
    rows = ops.take(table, rows, axis=0)
    return ops.reshape(ops.take(rows, places, axis=0), (-1, LENGTH, WIDTH))


def halves_of_unique(table, ids):
    """Looks a row up for two ids."""
    rows, places = tf.unique(tf.reshape(ids, [-1]))
    return tf.reshape(
        tf.gather(tf.gather(table, rows // 2), places), [-1, LENGTH, WIDTH]
    )


def joined_indices(table, ids):
    rows = tf.concat([tf.range(LENGTH), tf.reshape(ids, [-1])], 0)
    found = tf.gather(table, rows)
    return tf.reshape(found[LENGTH:], [-1, LENGTH, WIDTH]) + found[:LENGTH]


def bag_of_rows(table, ids):
    return tf.nn.safe_embedding_lookup_sparse(
        table, tf.sparse.from_dense(ids), combiner="mean"
    )[:, None]


def sparse_into_dense():
    inputs = keras.Input((ROWS,), sparse=True)
    outputs = layers.Dense(1)(layers.Dense(4)(inputs))
    return keras.Model(inputs, outputs), SPARSE


PROGRAMS = {
    "plain": lambda: of_tokens(layers.Embedding(ROWS, WIDTH)),
    "positions": lambda: of_tokens(Positions()),
    "positions of an open length": of_open_length,
    "positions in the table of tokens": lambda: of_tokens(OneTable()),
    "indices joined": lambda: of_tokens(Table(joined_indices)),
    "a table as a matrix": lambda: of_tokens(Tied()),
    "unique": lambda: of_tokens(Table(unique_rows)),
    "unique, shifted": lambda: of_tokens(Table(unique_shifted)),
    "unique, by Keras": lambda: of_tokens(Table(unique_by_keras)),
    "unique, halves": lambda: of_tokens(Table(halves_of_unique)),
    "unique beside plain": lambda: of_tokens(Table(unique_beside_plain)),
    "unique in a function": lambda: of_tokens(Table(unique_in_function)),
    "bag of rows": lambda: of_tokens(Table(bag_of_rows)),
    "sparse into dense": sparse_into_dense,
}


def trained(make, optimizer, count=0, batch=8):
    """Returns a model, and its history."""
    keras.utils.set_random_seed(1)
    model, x = make()
    model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
    if count:
        kc.replicate(model, devices=DEVICES[:count])
    data = tf.data.Dataset.from_tensor_slices((x, TARGETS))
    data = data.batch(batch, drop_remainder=batch != 8)
    return model, model.fit(data, epochs=2, verbose=0, shuffle=False)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_are_those_of_one_device(program, optimizer):
    one, expected = trained(PROGRAMS[program], optimizer)
    many, got = trained(PROGRAMS[program], optimizer, MANY)
    assert_same_training(one, many, expected, got)
    assert kc.in_sync(many)


class OfKnownSize(Positions):
    """Needs the number of samples while it is traced."""

    def build(self, shape):
        self.tokens.build(shape)
        self.positions.build(shape)

    def call(self, x):
        return ops.reshape(super().call(x), (int(x.shape[0]), LENGTH, WIDTH))

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape, WIDTH))


@pytest.mark.long
def test_positions_where_sizes_are_constants():
    def make():
        return of_tokens(OfKnownSize())

    one, expected = trained(make, "Adam", batch=6)
    with pytest.warns(
        kc.ConfluxWarning, match="cannot be traced for any number"
    ):
        many, got = trained(make, "Adam", 2, batch=6)
    assert_same_training(one, many, expected, got)


def test_what_is_made_of_distinct_indices_warns():
    def pairs(table, ids):
        rows, places = tf.unique(tf.reshape(ids, [-1]))
        found = tf.gather(table, tf.gather(rows, tf.range(tf.size(rows))))
        return tf.reshape(tf.gather(found, places), [-1, LENGTH, WIDTH])

    with pytest.warns(kc.ConfluxWarning, match="rows of .* are looked up by"):
        trained(lambda: of_tokens(Table(pairs)), "Adam", 2)


def of_positions(optimizer, loop):
    """Trains on batches of several lengths, and returns the weights."""
    keras.utils.set_random_seed(0)
    strategy = None if loop == "one device" else kc.replicate()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((None,), dtype="int32")])
        model.add(Positions())
        made = OPTIMIZERS[optimizer]()
        made.build(model.trainable_variables)

    def step(x, weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2) / weight
        grads = tape.gradient(loss, model.trainable_variables)
        if loop == "allreduce":
            grads = kc.allreduce("sum", grads)
        made.apply(grads, model.trainable_variables)

    run = {
        "one device": lambda: tf.function(step, reduce_retracing=True),
        "allreduce": lambda: kc.withdevices(step),
        "apply": lambda: tf.function(
            lambda *arguments: strategy.run(step, arguments),
            reduce_retracing=True,
        ),
    }[loop]()
    for length in (LENGTH, 3, 4):
        batch = TOKENS[:, :length].astype("int32")
        if strategy:
            run(kc.split(batch), tf.constant(22.0))
        else:
            run(tf.constant(batch), tf.constant(22.0))
    return model.get_weights()


@pytest.mark.parametrize("optimizer", ["Adam", "global_clipnorm"])
@pytest.mark.parametrize("loop", ["allreduce", "apply"])
def test_loops_have_the_row_of_a_position_once(loop, optimizer):
    expected = of_positions(optimizer, "one device")
    for got, wanted in zip(
        of_positions(optimizer, loop), expected, strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=1e-6)
