"""Plain values come back from the files of a checkpoint as they were."""

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_conflux._common import plain_values
from keras_conflux._common import stored_arrays


def and_back(value):
    """Returns a value after it has been written and read."""
    arrays = {}
    content = stored_arrays.to_bytes(plain_values.encode(value, arrays), arrays)
    return plain_values.decode(*stored_arrays.from_bytes(content))


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


@pytest.mark.parametrize(
    "value",
    [
        np.array([None]),
        np.zeros(2, [("name", object)]),
        keras.losses.MeanSquaredError(),
    ],
    ids=repr,
)
def test_what_is_no_plain_value(value):
    assert not plain_values.is_plain({"deep": [value]})
