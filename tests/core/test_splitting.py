"""How batches are split."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc
from keras_conflux._common import rows
from keras_conflux._custom_loops import given


@pytest.mark.parametrize("samples", [0, 1, 2, 5, 8, 13])
def test_parts_make_up_the_batch(count, samples):
    batch = {"x": np.arange(samples * 2).reshape(samples, 2), "none": None}
    parts = kc.split(batch, count)
    np.testing.assert_array_equal(
        np.concatenate([part["x"] for part in parts]), batch["x"]
    )
    sizes = [len(part["x"]) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_a_replica_without_samples_gets_a_stand_in(count, samples):
    x = tf.range(samples)
    for index in range(count):
        part = rows.shard_of(x, index, count, at_least_one=True)
        begin, end = rows.bounds(samples, index, count)
        expected = list(range(begin, end)) or [samples - 1]
        np.testing.assert_array_equal(part, expected)


def test_ragged_and_sparse_batches_are_split():
    ragged = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    sparse = tf.sparse.from_dense(np.eye(5))
    for batch, back in (
        (ragged, lambda parts: tf.concat(parts, 0).to_list()),
        (sparse, lambda parts: tf.sparse.to_dense(tf.sparse.concat(0, parts))),
    ):
        parts = list(kc.split(batch, MANY))
        np.testing.assert_array_equal(
            np.asarray(back(parts), object), np.asarray(back([batch]), object)
        )


def test_distribute_splits_pairs():
    x, y = np.arange(6.0), np.arange(6)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    batches = list(kc.distribute(dataset, MANY))
    assert len(batches) == 2
    for xs, ys in batches:
        assert isinstance(xs, kc.Replicas)
        np.testing.assert_array_equal(
            np.concatenate(list(xs)), np.concatenate(list(ys))
        )


def test_uneven_leaves_are_named():
    with pytest.raises(ValueError, match=r"4 at \[0\], 3 at \[1\]"):
        kc.split((np.ones(4), np.ones(3)), MANY)
    with pytest.raises(ValueError, match="batch"):
        kc.split(np.float32(3), MANY)


def test_a_distributed_dataset_passes_through():
    x, y = regression(48)
    one, many = dense(), kc.replicate(dense(), MANY)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4 * MANY)
    strategy = kc.replicate(devices=MANY)
    options = dict(epochs=2, verbose=0)
    expected = one.fit(dataset, **options)
    got = many.fit(strategy.experimental_distribute_dataset(dataset), **options)
    assert_same_training(one, many, expected, got)


def test_unbatched_data_raises_what_it_raises_on_one_device():
    x, y = regression(16)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    raised = []
    for model in (dense(), kc.replicate(dense(), MANY)):
        with pytest.raises(ValueError, match="Invalid input shape") as error:
            model.fit(dataset, verbose=0)
        raised.append(str(error.value).split("Invalid")[0])
    assert raised[0] == raised[1]


@several
def test_rows_that_may_be_those_of_a_process_alone(monkeypatch):
    monkeypatch.setattr(given, "process_count", lambda: 2)
    run = kc.withdevices(lambda x: x, devices=MANY)
    told = r"all rows of its process' float.*Replicas\(\[array\], devices=1\)"
    with pytest.warns(kc.ConfluxWarning, match=told):
        run(np.ones((2, 1)))
