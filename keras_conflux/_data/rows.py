"""Gives each replica its part of a batch."""

from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._data.prefetcher import run_ahead
from keras_conflux._data.transfer import device_of_leaf
from keras_conflux._data.transfer import place
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_for


def split(batch: Tree, devices: DevicesLike = None) -> Any:
    """Splits a batch along its first axis, one part a device.

    Parts are contiguous and in device order; the first ones get one sample
    more where the count does not divide. With fewer samples than devices the
    last devices get none.

    Args:
        batch: A tree of arrays or tensors of shape `(batch, ...)`.
        devices: See `keras_conflux.devices`. By default those of the open
            scope, else of `keras.distribution`, else those last given to
            `replicate`, else all.

    Returns:
        A `Replicas`; a tuple of them if `batch` is a tuple, as `(x, y)` is.

    Raises:
        ValueError: If the leaves have different numbers of samples.
    """
    return _split(batch, _devices(devices))


def distribute(
    dataset: Iterable[Any], devices: DevicesLike = None, *, ahead: int = 0
) -> Iterator[Any]:
    """Yields the batches of `dataset`, each split by `split`.

    For another epoch, call this again.

    Args:
        dataset: A batched `tf.data.Dataset` or any iterable of batches.
        devices: See `split`.
        ahead: How many batches may wait on the devices, drawn and split by a
            thread as in `keras_conflux.prefetch`. With 0 there is no thread,
            and each batch is drawn when it is asked for.

    Raises:
        ValueError: If `ahead` is negative, and what `split` raises.
    """
    chosen = _devices(devices)
    if ahead == 0:
        return map(lambda batch: _split(batch, chosen), dataset)
    return run_ahead(
        dataset, lambda batch: _split(batch, chosen, at_once=True), ahead
    )


def _devices(devices: DevicesLike) -> tuple[Device, ...]:
    strategy = current_strategy() if devices is None else strategy_for(devices)
    return strategy.devices


def _split(
    batch: Tree, devices: tuple[Device, ...], *, at_once: bool = False
) -> Any:
    assert_has_samples(batch)
    cut = [_cut(batch, index, len(devices)) for index in range(len(devices))]
    parts = place(cut, devices, at_once=at_once)
    if isinstance(batch, tuple):
        return tuple(
            Replicas(part, devices) for part in zip(*parts, strict=True)
        )
    return Replicas(parts, devices)


def _cut(batch: Tree, index: int, count: int) -> Tree:
    def cut(leaf: Any) -> Any:
        # Where it is, so that only this replica's rows travel.
        with tf.device(device_of_leaf(leaf) or "CPU:0"):
            return part_of(leaf, index, count)

    return trees.map_leaves(cut, batch)


def part_of(
    batch: Tree, index: int, count: int, at_least_one: bool = False
) -> Tree:
    """Returns the part of a batch that replica `index` of `count` gets.

    Args:
        batch: A tree of tensors of shape `(batch, ...)`.
        index: The replica.
        count: How many replicas there are.
        at_least_one: Gives a replica without samples the last sample.
    """

    def part(leaf: Any) -> Any:
        if not _has_samples(leaf):
            return leaf
        length = length_of(leaf)
        begin, end = bounds(length, index, count)
        if at_least_one:
            begin = _minimum(begin, length - 1)
            end = length - _minimum(length - end, length - begin - 1)
        return rows(leaf, begin, end)

    return trees.map_leaves(part, batch)


def sample_count(batch: Tree) -> int:
    """Returns the number of samples that a batch has.

    Args:
        batch: A tree of tensors of shape `(batch, ...)`, and of scalars, which
            are not counted.

    Raises:
        ValueError: If leaves disagree, or there are scalars only.
    """
    lengths = {
        path: int(length_of(leaf))
        for path, leaf in trees.with_paths(batch)
        if _has_samples(leaf)
    }
    if not lengths:
        raise ValueError(
            "A batch needs at least one array of shape (batch, ...). Received: "
            f"{batch!r}."
        )
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{n} at {path}" for path, n in lengths.items())
        raise ValueError(
            "All leaves of a batch need the same number of samples, as each "
            f"device gets its part of them: {listed}. Keep what is not one "
            "row a sample in the model, or repeat it for each sample."
        )
    return next(iter(lengths.values()))


def bounds(length: Any, index: int, count: int) -> tuple[Any, Any]:
    """Returns where a replica's part of `length` samples begins and ends."""
    small, extra = length // count, length % count
    begin = index * small + _minimum(index, extra)
    end = (index + 1) * small + _minimum(index + 1, extra)
    return begin, end


def _minimum(one: Any, other: Any) -> Any:
    if tf.is_tensor(one) or tf.is_tensor(other):
        return tf.minimum(tf.cast(one, tf.int64), tf.cast(other, tf.int64))
    return min(one, other)


def rows(leaf: Any, begin: Any, end: Any) -> Any:
    """Returns the samples from `begin` to `end` of one leaf."""
    if isinstance(leaf, tf.SparseTensor):
        sizes = tf.concat([[end - begin], leaf.dense_shape[1:]], 0)
        starts = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
        return tf.sparse.slice(leaf, starts, sizes)
    return tf.identity(leaf[begin:end])


def _has_samples(leaf: Any) -> bool:
    return leaf is not None and len(leaf.shape) > 0


def length_of(leaf: Any) -> Any:
    """Returns how many samples a leaf has, as a number if it is known."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    static = leaf.shape[0] if leaf.shape else None
    return tf.shape(leaf, tf.int64)[0] if static is None else static


def assert_has_samples(batch: Tree) -> None:
    """Raises unless all leaves are arrays of the same number of samples."""
    for path, leaf in trees.with_paths(batch):
        if leaf is not None and len(getattr(leaf, "shape", ())) == 0:
            raise ValueError(
                "Every leaf of a batch is an array of shape (batch, ...). "
                f"Received at {path}: {leaf!r}."
            )
    sample_count(batch)
