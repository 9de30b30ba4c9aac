"""`shard`: which samples of a data set a worker gets."""

import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import keras_conflux as kc

# How many samples among how many workers: even, uneven, and too few.
SIZES = [(12, 4), (10, 4), (5, 3), (9, 8), (2, 4), (1, 3), (0, 2), (3, 1)]
pads = pytest.mark.parametrize("pad", [False, True])
sizes = pytest.mark.parametrize(("samples", "count"), SIZES)


def expected(samples: int, index: int, count: int, pad: bool) -> list[int]:
    size = math.ceil(samples / count)
    positions = range(index * size, (index + 1) * size)
    return [p % samples for p in positions if pad or p < samples]


@pads
@sizes
@pytest.mark.parametrize(
    ("make", "back"),
    [
        (np.arange, list),
        (tf.range, lambda part: list(part.numpy())),
        (lambda n: {"x": [np.arange(n)], "none": None}, lambda p: p["x"][0]),
        (tf.data.Dataset.range, lambda p: list(p.as_numpy_iterator())),
        (lambda n: [str(i) for i in range(n)], lambda p: [int(s) for s in p]),
        (range, list),
    ],
    ids=["array", "tensor", "tree", "dataset", "list", "range"],
)
def test_parts_are_contiguous_and_of_one_length(
    make, back, samples, count, pad
):
    for index in range(count):
        part = kc.shard(make(samples), index, count, pad=pad)
        assert list(back(part)) == expected(samples, index, count, pad)


@pads
def test_ragged_and_sparse_tensors_are_cut(pad):
    ragged = tf.ragged.constant([[0], [1, 1], [], [3], [4]])
    sparse = tf.sparse.from_dense(np.eye(5))
    for index in range(3):
        rows = expected(5, index, 3, pad)
        part = kc.shard((ragged, sparse), index, 3, pad=pad)
        assert part[0].to_list() == [ragged.to_list()[row] for row in rows]
        np.testing.assert_array_equal(
            tf.sparse.to_dense(part[1]), np.eye(5)[rows]
        )


def test_an_array_is_not_copied():
    x = np.arange(8.0)
    assert np.shares_memory(kc.shard(x, 1, 2), x)


def test_a_part_of_a_sequence_is_a_sequence():
    names = [pathlib.Path(f"{i}.png") for i in range(5)]
    part = kc.shard(names, 1, 2, pad=True)
    assert len(part) == 3
    assert part[-1] == names[0]
    assert part[:2] == names[3:5]
    assert names[4] in part
    with pytest.raises(IndexError):
        part[3]


def test_the_length_of_a_dataset_is_known_afterwards():
    dataset = tf.data.Dataset.range(5)
    for pad, lengths in ((False, [2, 2, 1]), (True, [2, 2, 2])):
        parts = [kc.shard(dataset, i, 3, pad=pad) for i in range(3)]
        assert [int(part.cardinality()) for part in parts] == lengths


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kc.shard(np.ones(3), 2, 2), ValueError, "index=2, count=2"),
        (lambda: kc.shard(np.ones(3), -1, 2), ValueError, "index=-1"),
        (lambda: kc.shard(np.ones(3), 0, 0), ValueError, "count=0"),
        (
            lambda: kc.shard((np.ones(3), np.ones(4)), 0, 2),
            ValueError,
            r"3 at \[0\], 4 at \[1\]",
        ),
        (
            lambda: kc.shard((np.ones(3), np.float32(1)), 0, 2),
            ValueError,
            r"Received: \[1\] is ",
        ),
        (
            lambda: kc.shard(tf.data.Dataset.range(3).repeat(), 0, 2),
            ValueError,
            r"infinite.*dataset\.shard\(count, index\)",
        ),
        (
            lambda: kc.shard(
                tf.data.Dataset.range(3).filter(lambda i: i > 0), 0, 2
            ),
            ValueError,
            "unknown.*assert_cardinality",
        ),
        (lambda: kc.shard(iter([1, 2]), 0, 2), TypeError, "list_iterator"),
        (lambda: kc.shard({"files": ["a"]}, 0, 2), TypeError, "dict"),
    ],
)
def test_wrong_input_raises(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_workers_of_padded_parts_train_the_same_number_of_steps():
    x = np.arange(10.0)
    batches = [
        len(list(tf.data.Dataset.from_tensor_slices(part).batch(2)))
        for part in (kc.shard(x, index, 4, pad=True) for index in range(4))
    ]
    assert batches == [2, 2, 2, 2]
