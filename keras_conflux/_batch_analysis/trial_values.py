"""Draws the samples on which a graph is tried out, and takes parts of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis.derivation import NotDerivable

_OPEN_SIZE = 3
"""The size of axes whose size is not known."""


class RandomValues:
    """Draws values for tensors of any shape.

    Floating numbers have a scale. With `None` they are between 0 and 1, as
    probabilities are. `smallest` is the smaller one of the two integers that
    are drawn.
    """

    def __init__(self, scale: float | None, smallest: int, seed: int) -> None:
        self._scale = scale
        self._smallest = smallest
        self._random = np.random.default_rng(seed)

    def rows(self, tensor: tf.Tensor, axis: int, samples: int) -> Any:
        """Returns entries for a number of samples along an axis."""
        shape = _closed(tensor.shape.as_list())
        if tensor.dtype == tf.variant:  # a list that gradients keep
            raise NotDerivable(tensor.name)
        shape[axis] = samples
        return self._numbers(shape, tensor.dtype, self._scale)

    def shared(self, shape: Sequence[int], dtype: tf.DType) -> Any:
        """Returns a value that all samples share, and that is not large."""
        scale = None if self._scale is None else 1
        return self._numbers(shape, dtype, scale)

    def _numbers(
        self, shape: Sequence[int], dtype: tf.DType, scale: float | None
    ) -> Any:
        if dtype.is_floating and scale is None:
            drawn = self._random.uniform(0.01, 0.99, shape)
        elif dtype.is_floating:
            drawn = (scale or 1) * self._random.normal(size=shape)
        elif dtype.is_bool:
            drawn = self._random.integers(0, 2, shape)
        elif dtype.is_integer:
            drawn = self._smallest + self._random.integers(0, 2, shape)
        else:
            raise NotDerivable(str(dtype))
        return drawn.astype(dtype.as_numpy_dtype)

    def composite(self, leaf: Any, samples: int) -> list[Any]:
        """Returns the `parts_of_samples` of a leaf, for some samples."""
        if isinstance(leaf, tf.RaggedTensor):
            return self._ragged(leaf, samples)
        return self._sparse(leaf, samples)

    def _ragged(self, leaf: tf.RaggedTensor, samples: int) -> list[Any]:
        splits, count = [], samples
        for each in leaf.nested_row_splits:
            lengths = self._random.integers(0, 4, count)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            splits.append(ends.astype(each.dtype.as_numpy_dtype))
            count = int(ends[-1])
        return [self.rows(leaf.flat_values, 0, count), *splits]

    def _sparse(self, leaf: tf.SparseTensor, samples: int) -> list[Any]:
        shape = [samples, *_closed(leaf.shape.as_list()[1:])]
        places = np.argwhere(self._random.integers(0, 2, shape))
        dtype = leaf.values.dtype
        values = self._numbers([len(places)], dtype, self._scale)
        return [places.astype(np.int64), values, np.asarray(shape, np.int64)]


def nudged(values: Any, seed: int) -> Any:
    """Returns floating numbers that differ by little more than a rounding."""
    if values.dtype.kind != "f":
        return values
    random = np.random.default_rng(seed)
    factors = 1 + 1e-6 * random.normal(size=values.shape)
    return (values * factors).astype(values.dtype)


def parts_of_samples(leaf: Any) -> list[tf.Tensor]:
    """Returns the tensors that hold a ragged or a sparse leaf of a batch."""
    if isinstance(leaf, tf.RaggedTensor):
        return [leaf.flat_values, *leaf.nested_row_splits]
    return [leaf.indices, leaf.values, leaf.dense_shape]


def cut(leaf: Any, parts: list[Any], begin: int, size: int) -> list[Any]:
    """Returns the parts of a ragged or sparse leaf for a range of samples."""
    if isinstance(leaf, tf.RaggedTensor):
        flat, *splits = parts
        end, taken = begin + size, []
        for each in splits:
            taken.append(each[begin : end + 1] - each[begin])
            begin, end = int(each[begin]), int(each[end])
        return [flat[begin:end], *taken]
    places, values, shape = parts
    chosen = (places[:, 0] >= begin) & (places[:, 0] < begin + size)
    first = np.zeros_like(places[:1])
    first[:, :1] = begin
    return [places[chosen] - first, values[chosen], [size, *shape[1:]]]


def _closed(shape: list[int | None]) -> list[int]:
    return [_OPEN_SIZE if size is None else size for size in shape]
