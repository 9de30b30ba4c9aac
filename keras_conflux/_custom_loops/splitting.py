"""Splits batches over devices, and data sets over workers."""

import functools
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias
from typing import TypeVar
from typing import overload

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import arguments
from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._custom_loops.prefetcher import run_ahead
from keras_conflux._data.batches import Batches
from keras_conflux._data.transfer import device_of_leaf
from keras_conflux._data.transfer import place
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._fit.input.batch_sharder import checksum
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_over

Array: TypeAlias = npt.NDArray[Any] | tf.Tensor
Pair: TypeAlias = tuple[Array, Array]
Parts: TypeAlias = Replicas[tf.Tensor]
V = TypeVar("V")


@overload
def split(batch: Array, devices: DevicesLike = None) -> Parts: ...
@overload
def split(batch: Pair, devices: DevicesLike = None) -> tuple[Parts, Parts]: ...
@overload
def split(
    batch: tuple[Array, Array, Array], devices: DevicesLike = None
) -> tuple[Parts, Parts, Parts]: ...
@overload
def split(
    batch: tuple[V, ...], devices: DevicesLike = None
) -> tuple[Replicas[V], ...]: ...
@overload
def split(batch: V, devices: DevicesLike = None) -> Replicas[V]: ...
def split(batch: trees.Tree, devices: DevicesLike = None) -> Any:
    """Splits a batch along its first axis, one part per device.

    Parts are contiguous and in device order; the first ones get one sample
    more where the count does not divide. With fewer samples than devices the
    last ones get none. FluxDistributed.jl gives a part to each device, too.

    Args:
        batch: A tree of arrays or tensors of shape `(batch, ...)`.
        devices: See `keras_conflux.devices`. Default: the devices of the
            open scope, else of `keras.distribution`, else all.

    Returns:
        A `Replicas`; a tuple of them if `batch` is a tuple, as `(x, y)` is.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        ValueError: If leaves have no first axis or other numbers of samples.

    Example:
        ```python
        parts = kc.split(np.arange(10), devices=4)
        print([len(part) for part in parts])  # [3, 3, 2, 2]

        inputs, targets = kc.split((x, y))
        ```
    """
    return _split(batch, _devices(devices))


@overload
def distribute(
    dataset: Iterable[Array], devices: DevicesLike = None, *, ahead: int = 0
) -> Batches[Parts]: ...
@overload
def distribute(
    dataset: Iterable[Pair], devices: DevicesLike = None, *, ahead: int = 0
) -> Batches[tuple[Parts, Parts]]: ...
@overload
def distribute(
    dataset: Iterable[Any], devices: DevicesLike = None, *, ahead: int = 0
) -> Batches[Any]: ...
def distribute(
    dataset: Iterable[Any], devices: DevicesLike = None, *, ahead: int = 0
) -> Batches[Any]:
    """Splits the batches of `dataset`, each as `split` does.

    Args:
        dataset: A batched `tf.data.Dataset` or any iterable of batches. A
            generator, or another iterator, has one epoch.
        devices: See `keras_conflux.devices`. Default: the devices of the
            open scope, else of `keras.distribution`, else all.
        ahead: The number of batches that may wait on the devices, drawn and
            split by a thread as in `keras_conflux.prefetch`. With 0 there is no
            thread, and each batch is drawn when it is asked for.

    Returns:
        An iterable over the results of `split`, which are tuples of two
        `Replicas` for batches `(x, y)`. Iterate over it once per epoch. `len`
        is the number of batches, where `dataset` tells it.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        TypeError: If `dataset` cannot be iterated over.
        ValueError: If `ahead` is negative. While it is iterated over, if a
            batch cannot be split, as `split` says, or if `dataset` is an
            iterator that has ended.

    Example:
        ```python
        model = kc.replicate(build_model())
        predict = kc.withdevices(model)
        batches = kc.distribute(dataset, ahead=2)
        for epoch in range(2):
            for inputs, targets in batches:
                outputs = predict(inputs)
        ```
    """
    arguments.assert_batches(dataset)
    arrays = tf.Tensor | np.ndarray
    if isinstance(dataset, tuple) and isinstance(dataset[0], arrays):
        raise ValueError(
            "`distribute` takes batches, and a tuple of arrays is one batch. "
            "Write `kc.distribute(tf.data.Dataset.from_tensor_slices((x, y))"
            ".batch(64))`, or `kc.split((x, y))` for this batch alone."
        )
    what = "a number of batches, or 0 to move each when it is asked for"
    arguments.assert_count("ahead", ahead, what, least=0)
    chosen = _devices(devices)
    parts = functools.partial(_split, devices=chosen, at_once=ahead > 0)

    def ready(source: Iterable[Any]) -> Iterator[Any]:
        return run_ahead(source, parts, ahead) if ahead else map(parts, source)

    return Batches(dataset, ready)


def _devices(devices: DevicesLike) -> tuple[Device, ...]:
    if isinstance(devices, tf.Tensor | np.ndarray):
        raise TypeError(
            "`split` takes one batch. Received an array as the devices: write "
            "`kc.split((x, y))`."
        )
    strategy = current_strategy() if devices is None else strategy_over(devices)
    return strategy.devices


def _split(
    batch: trees.Tree, devices: tuple[Device, ...], *, at_once: bool = False
) -> Any:
    rows.assert_has_samples(batch)
    communicator = strategy_over(devices).communicator
    cut = [
        _cut(batch, communicator.rank(index), communicator.size)
        for index in range(len(devices))
    ]
    parts = place(cut, devices, at_once=at_once)
    is_uneven = rows.sample_count(batch) % communicator.size > 0
    of_batch = checksum([batch])

    def replicas(parts: Sequence[trees.Tree]) -> Replicas[Any]:
        found = Replicas(parts, devices)
        found.is_uneven, found.checksum = is_uneven, of_batch
        return found

    if isinstance(batch, tuple):
        return tuple(map(replicas, zip(*parts, strict=True)))
    return replicas(parts)


def _cut(batch: trees.Tree, index: int, count: int) -> trees.Tree:
    def cut(leaf: Any) -> Any:
        # Where it is, so that only this replica's rows travel.
        with tf.device(device_of_leaf(leaf) or "CPU:0"):
            return rows.shard_of(leaf, index, count)

    return trees.map_leaves(cut, batch)


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
            or other numbers of samples, or a dataset has no known length.

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
        part = _part(rows.sample_count(samples), index, count, pad)
        return trees.map_leaves(lambda x: _cut_of_worker(x, part), samples)
    if not hasattr(samples, "__len__") or isinstance(samples, dict | str):
        raise TypeError(
            "`shard` takes arrays, a tree of arrays, a `tf.data.Dataset`, or "
            "an object with a length and indices. Received: "
            f"{type(samples).__name__}."
        )
    return _View(samples, _part(len(samples), index, count, pad))


def _part(length: int, index: int, count: int, pad: bool) -> range:
    """Returns the samples of a part; past the last one comes the first."""
    size = -(-length // count)
    begin = index * size
    if not pad:
        return range(length)[begin : begin + size]
    begin %= max(length, 1)
    return range(begin, begin + size)


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
    part = _part(length, index, count, pad)
    if part.stop > length:
        dataset = dataset.repeat(2)
    return dataset.skip(part.start).take(len(part))


def _cut_of_worker(leaf: Any, part: range) -> Any:
    length = int(rows.length_of(leaf))
    if part.stop <= length:
        return _rows(leaf, part.start, part.stop)
    more = part.stop - length
    pieces = [_rows(leaf, part.start, length), _rows(leaf, 0, more)]
    is_tensor = isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)
    return rows.joined(pieces) if is_tensor else np.concatenate(pieces)


def _rows(leaf: Any, begin: int, end: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return rows.take(leaf, begin, end)
    return leaf[begin:end]  # of an array a view, so nothing is copied


class _View(Sequence[Any]):
    """Some elements of a sequence, looked up when they are asked for."""

    def __init__(self, samples: Any, part: range) -> None:
        self._samples = samples
        self._part = part

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, which: int | slice) -> Any:
        chosen, count = self._part[which], len(self._samples)
        if isinstance(chosen, range):
            return [self._samples[each % count] for each in chosen]
        return self._samples[chosen % count]
