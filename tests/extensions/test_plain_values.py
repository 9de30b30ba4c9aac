"""Plain values come back from the files of a checkpoint as they were."""

import collections
import contextlib

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_conflux._extensions.resume import plain_values


def and_back(value):
    """Returns a value after it has been written and read."""
    return plain_values.from_bytes(plain_values.to_bytes(value))


ARRAYS = [
    np.array([(1.5, 2), (2.5, 3)], [("loss", "f4"), ("epoch", "i4")]),
    np.array([1.5, 2.5], ml_dtypes.bfloat16),
    np.array([1.5, 2.5], ml_dtypes.float8_e4m3fn),
    np.array([1, 2], "datetime64[s]"),
    np.array(["one", "another"]),
    np.zeros((0, 3), bool),
    np.array(2.5),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_of_all_kinds(array):
    (found,) = and_back([array])
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


def test_a_changed_bit_is_noticed():
    content = bytearray(plain_values.to_bytes({"state": [1, 2], 3: ARRAYS}))
    expected = plain_values.from_bytes(content)
    for place in range(len(content)):
        bit = 1 << place % 8
        content[place] ^= bit
        with contextlib.suppress(Exception):
            # Dates of entries, for example, mean nothing.
            found = plain_values.from_bytes(content)
            assert repr(found) == repr(expected)
        content[place] ^= bit


VALUES = [
    {"k": (1, [2.5, None, True]), 3: {}},
    {1, "two", (3, 4)},
    frozenset({1.5}),
    collections.deque([1, 2], maxlen=2),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("abba"),
    collections.defaultdict(list, {"loss": [0.5]}),
    b"\x00\xff",
    bytearray(b"\x01"),
    10**30,
    2.5 - 1j,
    float("-inf"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda x: type(x).__name__)
def test_values_of_all_kinds(value):
    (found,) = and_back([value])
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set)
    if isinstance(value, collections.defaultdict):
        assert found["more"] == []


@pytest.mark.parametrize(
    "value",
    [
        collections.defaultdict(lambda: 3),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        np.array([None]),
        np.zeros(2, [("name", object)]),
        keras.losses.MeanSquaredError(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_value(value):
    assert not plain_values.is_plain({"deep": [value]})
