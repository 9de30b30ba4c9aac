"""Gives each worker its part of a data set."""

from collections.abc import Sequence
from typing import Any
from typing import TypeVar
from typing import overload

import numpy as np
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import arguments
from keras_conflux._common import rows
from keras_conflux._common import trees

V = TypeVar("V")


@overload
def shard(
    samples: list[str],
    index: int | None = None,
    count: int | None = None,
    *,
    pad: bool = False,
) -> Sequence[str]: ...
@overload
def shard(
    samples: V,
    index: int | None = None,
    count: int | None = None,
    *,
    pad: bool = False,
) -> V: ...
def shard(
    samples: Any,
    index: int | None = None,
    count: int | None = None,
    *,
    pad: bool = False,
) -> Any:
    """Returns the part of a data set that worker `index` of `count` gets.

    Parts are contiguous, in the order of the workers, and of
    `ceil(len(samples) / count)` samples each; the last ones are shorter or
    empty where that is too many. This is how `DistributedDataContainer` of
    Lux.jl and Flux.jl cuts. `split`, which cuts a batch for the devices of a
    strategy, makes parts as even as can be instead.

    Workers that meet in each step need parts of one length. `pad=True` fills
    the last parts up with the first samples of the data set, as if it began
    anew after its last one; these are then seen more than once.

    Kinds of samples, and of their parts:

    * an array, a tensor, or a tree of them of shape `(samples, ...)`, such as
      `(x, y)`: the same of fewer samples. A list of arrays is such a tree;
    * a `tf.data.Dataset` of known length: a `Dataset`. Its elements are
      counted, so shard before `batch`. A worker reads and drops the elements
      before its part; `Dataset.shard` and lists of files do not;
    * anything else with a length and indices, such as a list of file names: a
      `Sequence` that looks up its elements when they are asked for.

    Args:
        samples: The whole data set, see above.
        index: The worker, from 0. By default `process_index()`.
        count: The number of workers. By default `process_count()`.
        pad: Whether all parts shall be of one length.

    Returns:
        The worker's part, of the kind that is listed above.

    Raises:
        TypeError: If `samples` has no length.
        ValueError: If there is no such worker, if leaves have no first axis
            or different numbers of samples, or if a dataset's length is not
            known.

    Example:
        ```python
        kc.shard(np.arange(10), index=3, count=4)  # [9]
        kc.shard(np.arange(10), index=3, count=4, pad=True)  # [9, 0, 1]
        images, labels = kc.shard((x, y), index=0, count=2)
        ```
    """
    index = process_index() if index is None else index
    count = process_count() if count is None else count
    arguments.assert_count("count", count, "how many workers there are")
    arguments.assert_count("index", index, "a worker's", least=0)
    if index not in range(count):
        raise ValueError(
            "`index` is a worker's, from 0 to `count` - 1. Received: "
            f"index={index}, count={count}."
        )
    if isinstance(samples, tf.data.Dataset):
        return _of_dataset(samples, index, count, pad)
    leaves = trees.present(samples)
    if leaves and all(hasattr(leaf, "shape") for leaf in leaves):
        rows.assert_has_samples(samples)
        length = rows.sample_count(samples)
        begin, size = _part(length, index, count, pad)
        return trees.map_leaves(lambda leaf: _cut(leaf, begin, size), samples)
    if not hasattr(samples, "__len__") or isinstance(samples, dict | str):
        raise TypeError(
            "`shard` takes arrays, a tree of arrays, a `tf.data.Dataset`, or "
            "an object with a length and indices. Received: "
            f"{type(samples).__name__}."
        )
    return _View(samples, *_part(len(samples), index, count, pad))


def _part(length: int, index: int, count: int, pad: bool) -> tuple[int, int]:
    """Returns a part's first sample and size; past the last comes the first."""
    size = -(-length // count)
    begin = index * size
    if pad:
        return begin % max(length, 1), size
    begin = min(begin, length)
    return begin, min(size, length - begin)


def _of_dataset(
    dataset: "tf.data.Dataset[Any]", index: int, count: int, pad: bool
) -> "tf.data.Dataset[Any]":
    length = int(dataset.cardinality())
    if length < 0:
        endless = length == tf.data.INFINITE_CARDINALITY
        raise ValueError(
            "The parts of a dataset begin where its length says, and this "
            f"one's is {'infinite' if endless else 'unknown'}. Give every "
            "`count`-th element to a worker with `dataset.shard(count, index)`"
            ", or say how long it is with `dataset.apply("
            "tf.data.experimental.assert_cardinality(length))`."
        )
    begin, size = _part(length, index, count, pad)
    if begin + size > length:
        dataset = dataset.repeat(2)
    return dataset.skip(begin).take(size)


def _cut(leaf: Any, begin: int, size: int) -> Any:
    length = int(rows.length_of(leaf))
    more = begin + size - length
    if more <= 0:
        return _rows(leaf, begin, begin + size)
    pieces = [_rows(leaf, begin, length), _rows(leaf, 0, more)]
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.concat(0, pieces)
    is_tensor = isinstance(leaf, tf.Tensor | tf.RaggedTensor)
    return tf.concat(pieces, 0) if is_tensor else np.concatenate(pieces)


def _rows(leaf: Any, begin: int, end: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return rows.take(leaf, begin, end)
    return leaf[begin:end]  # of an array a view, so nothing is copied


class _View(Sequence[Any]):
    """Some elements of a sequence, looked up when they are asked for."""

    def __init__(self, samples: Any, begin: int, size: int) -> None:
        self._samples = samples
        self._begin = begin
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, which: int | slice) -> Any:
        chosen = range(self._size)[which]
        if isinstance(chosen, range):
            return [self[position] for position in chosen]
        return self._samples[(self._begin + chosen) % len(self._samples)]
