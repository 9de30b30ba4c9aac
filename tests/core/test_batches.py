"""Batches and outputs of unusual shapes, against one device."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import several
from models import dense

import keras_conflux as kc
from keras_conflux._fit.input import host_to_device
from keras_conflux._fit.input.batch_sharder import BatchSharder
from keras_conflux._replication.strategy import strategy_for

X = np.arange(68, dtype="float32").reshape(17, 4)


def replicated(outputs, count=MANY):
    """A model that predicts `outputs(x)`, and the same on one device."""

    class Model(keras.Model):
        def call(self, x):
            return outputs(x)

    models = Model(), kc.replicate(Model(), count)
    for model in models:
        model.compile(jit_compile=False)
    return models


# Rows that are chosen by their place in the batch are so where parts are even.
@pytest.mark.filterwarnings("ignore:.*depends on other samples")
@pytest.mark.parametrize(
    ("outputs", "samples"),
    [
        (lambda x: keras.ops.repeat(x, 2, axis=0), 10),  # more rows
        (lambda x: keras.ops.repeat(x, 2, axis=0), 1),
        (lambda x: x[::2], 2 * MANY),  # fewer, where parts are even
        (lambda x: {"rows": x, "sums": keras.ops.sum(x, axis=1)}, 10),
        (lambda x: {"rows": x, "sums": keras.ops.sum(x, axis=1)}, 1),
    ],
)
def test_predict_of_any_number_of_rows(outputs, samples):
    one, many = replicated(outputs)
    got = many.predict(X[:samples], verbose=0)
    keras.tree.map_structure(
        np.testing.assert_array_equal,
        got,
        one.predict(X[:samples], verbose=0),
    )


def test_predict_of_a_mean():
    one, many = replicated(keras.ops.mean)
    np.testing.assert_allclose(
        many.predict_on_batch(X), one.predict_on_batch(X), rtol=1e-6
    )


@several
def test_leaves_of_different_lengths_are_refused():
    model = kc.replicate(dense("sgd"), MANY)
    batch = np.zeros((9, 8), "float32"), np.zeros(8, "float32")
    with pytest.raises(ValueError, match=r"9 at \[0\], 8 at \[1\]"):
        model.fit((batch for _ in range(1)), verbose=0)


class SemiSupervised(keras.Model):
    """Learns from samples with targets, and from more without."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def train_step(self, data):
        (more, _), (x, y) = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.dense(x) - y) ** 2)
            loss += 0.1 * keras.ops.mean(self.dense(more) ** 2)
        weights = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@several
@pytest.mark.parametrize("drop_remainder", [True, False])
def test_leaves_of_different_lengths_that_divide_evenly(drop_remainder):
    def batches(samples, size):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(samples, 3)).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
        return data.batch(size, drop_remainder)

    data = tf.data.Dataset.zip((batches(80, 16), batches(20, 4)))
    outcomes = []
    for count in (None, 2):
        keras.utils.set_random_seed(1)
        model = SemiSupervised()
        model.compile(keras.optimizers.SGD(0.1))
        if count:
            kc.replicate(model, count)
        with (
            pytest.warns(kc.ConfluxWarning, match="16 at")
            if count
            else contextlib.nullcontext()
        ):
            history = model.fit(data, epochs=2, verbose=0)
        outcomes.append([*model.dense.get_weights(), history.history["loss"]])
    for one, many in zip(*outcomes, strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


def mean_of_squares(rows):
    return keras.ops.mean(rows**2)


def squares_of_rows(rows):
    return keras.ops.sum(rows**2, -1)


def other_rows_by_their_places(rows):
    """Each row is to be told from the others, the later the more."""
    places = keras.ops.arange(keras.ops.shape(rows)[0])
    alike = keras.ops.matmul(rows, keras.ops.transpose(rows))
    alike *= keras.ops.cast(1 + places, "float32")[:, None]
    return keras.losses.sparse_categorical_crossentropy(
        places, alike, from_logits=True
    )


class Joined(keras.Model):
    """Sends samples with and without targets through a layer at once."""

    def __init__(self, loss_of_rows, join):
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.loss_of_rows = loss_of_rows
        self.join = join

    def train_step(self, data):
        with tf.GradientTape() as tape:
            rows = self.dense(self.join(*data))
            loss = self.loss_of_rows(rows)
        weights = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": keras.ops.mean(loss)}


def one_after_the_other(many, few):
    return keras.ops.concatenate([many, few], 0)


def of_three_blocks(many, few):
    return keras.ops.concatenate([few, one_after_the_other(many, few)], 0)


def twice_as_many_of_one(many, few):
    return keras.ops.concatenate([keras.ops.reshape(many, (-1, 3)), few], 0)


@pytest.mark.sampled(3)
@several
@pytest.mark.parametrize(
    "loss_of_rows",
    [mean_of_squares, squares_of_rows, other_rows_by_their_places],
)
@pytest.mark.parametrize(
    ("join", "sizes"),
    [
        (one_after_the_other, [((24, 3), 12), ((12, 3), 6)]),
        (of_three_blocks, [((24, 3), 12), ((12, 3), 6)]),
        (twice_as_many_of_one, [((10, 2, 3), 4), ((10, 3), 4)]),
    ],
)
def test_tensors_of_different_lengths_may_be_joined(loss_of_rows, join, sizes):
    rng = np.random.default_rng(0)
    parts = [
        tf.data.Dataset.from_tensor_slices(
            rng.normal(size=shape).astype("float32")
        ).batch(size)
        for shape, size in sizes
    ]
    data = tf.data.Dataset.zip(tuple(parts))
    outcomes = []
    for count in (None, 2):
        keras.utils.set_random_seed(1)
        model = Joined(loss_of_rows, join)
        model.compile(keras.optimizers.SGD(0.01))
        if count:
            kc.replicate(model, count)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The leaves of a batch")
            history = model.fit(data, epochs=2, verbose=0)
        outcomes.append([*model.dense.get_weights(), history.history["loss"]])
    for one, many in zip(*outcomes, strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


def test_predict_on_data_of_unknown_rank():
    one, many = replicated(lambda x: x * 2)

    def batches():
        yield X

    data = tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec(None, tf.float32)
    )
    np.testing.assert_array_equal(many.predict(data, verbose=0), X * 2)
    np.testing.assert_array_equal(one.predict(data, verbose=0), X * 2)


def test_each_length_is_not_traced_anew():
    traced = []

    class Model(keras.Model):
        def call(self, x):
            traced.append(x.shape)
            return x

    model = kc.replicate(Model(), MANY)
    for length in range(2, 8):
        x = np.ones((8, length), "float32")
        assert model.predict_on_batch(x).shape == x.shape
    assert len(traced) <= 3 * MANY  # symbolic build, first length, any length


@pytest.mark.parametrize("staged", [1, 3 * 8 * 4 * 4, 2**20])
def test_a_stack_is_moved_in_groups(staged, monkeypatch):
    monkeypatch.setattr(host_to_device, "STAGING_BYTES", staged)
    split = BatchSharder(strategy_for(MANY), stacks=True)
    whole = np.arange(7 * 8 * MANY * 4, dtype="float32")
    drawn = whole.reshape(7, 8 * MANY, 4)
    ids = np.arange(7 * 8 * MANY, dtype="int32").reshape(7, -1)
    (stack,) = split(
        [{"x": x, "id": i} for x, i in zip(drawn, ids, strict=True)]
    )
    assert stack.steps == 7
    for index, (got_ids, got) in enumerate(stack.shards):
        rows = slice(8 * index, 8 * (index + 1))
        np.testing.assert_array_equal(got, drawn[:, rows])
        np.testing.assert_array_equal(got_ids, ids[:, rows])
        assert got.backing_device.endswith(strategy_for(MANY).devices[index])


DTYPES = "uint8 int8 bool int32 int64 float16 bfloat16 float32 float64"


def test_groups_of_any_dtype_are_joined(monkeypatch):
    rng = np.random.default_rng(0)
    leaves = [
        tf.cast(rng.integers(-100, 100, (7, 2 * MANY, *shape)), dtype)
        for dtype in DTYPES.split()
        for shape in ((3, 8), (), (0,))
    ]
    batches = [[leaf[i] for leaf in leaves] for i in range(7)]
    placement = host_to_device.Placement(strategy_for(MANY).devices, 0, MANY)
    size = host_to_device.size_in_bytes(batches[0]) // MANY
    monkeypatch.setattr(host_to_device, "STAGING_BYTES", 2 * size)
    moved = host_to_device.move_stacked(batches, placement)
    for index, shard in enumerate(moved):
        rows = slice(2 * index, 2 * (index + 1))
        for got, leaf in zip(shard, leaves, strict=True):
            assert got.dtype == leaf.dtype
            np.testing.assert_array_equal(got, leaf[:, rows])
        images = shard[0]  # uint8, of 24 entries each
        assert images.backing_device.endswith(placement.devices[index])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float32", "bool", "int32"])
@pytest.mark.parametrize("shape", [(2, 3), (4, 0), (3, 8), (2,)])
def test_pieces_are_concatenated(dtype, shape):
    rng = np.random.default_rng(0)
    pieces = [
        rng.integers(-128, 128, (rows, *shape)).astype(dtype)
        for rows in (2, 1, 4)
    ]
    got = host_to_device.concatenated(*map(tf.convert_to_tensor, pieces))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.concatenate(pieces))


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool", "int32"])
def test_batches_are_taken_from_a_stack(dtype):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, (3, 4, 2)).astype(dtype)
    with tf.device(DEVICES[-1]):
        stack = tf.identity(tf.constant(values))
    for position in range(3):
        batch = host_to_device.batch_at(stack, position)
        np.testing.assert_array_equal(batch, values[position])
        assert batch.dtype == dtype
        if dtype != "int32":  # which TensorFlow keeps in the host's memory
            assert batch.backing_device == stack.backing_device


def test_another_fit_traces_no_moves_again():
    strategy = strategy_for(MANY)
    drawn = [tf.zeros((8 * MANY, 5))] * 3
    BatchSharder(strategy, stacks=True)(drawn)
    before = host_to_device._graph.cache_info()
    BatchSharder(strategy, stacks=True)(drawn)
    after = host_to_device._graph.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits


def test_specs_become_general():
    split = BatchSharder(strategy_for(MANY), stacks=False)
    shapes = [(8, 3), (8, 3), (8, 5), (8, 3)]
    specs = [split([{"x": tf.zeros(s), "y": None}])[0].specs[0] for s in shapes]
    assert [spec["x"].shape[1] for spec in specs] == [3, 3, None, None]
    (other,) = split([{"x": tf.zeros((8, 3, 1)), "y": None}])
    assert other.specs[0]["x"].shape[1:] == (3, 1)
