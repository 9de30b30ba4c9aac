"""Gives each replica its part of a batch."""

from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux import trees
from keras_conflux.devices import DevicesLike
from keras_conflux.replicas import Replicas
from keras_conflux.strategy import current_strategy
from keras_conflux.strategy import strategy_for
from keras_conflux.trees import Tree


def split(batch: Tree, devices: DevicesLike = None) -> Any:
    """Splits a batch along its first axis, one part a device.

    Parts are contiguous and in device order; the first ones get one sample
    more where the count does not divide. With fewer samples than devices the
    last devices get none.

    Args:
        batch: A tree of arrays or tensors of shape `(batch, ...)`.
        devices: See `keras_conflux.devices`. By default those of the open
            scope, else those last given to `replicate`, else all.

    Returns:
        A `Replicas`; a tuple of them if `batch` is a tuple, as `(x, y)` is.

    Raises:
        ValueError: If the leaves have different numbers of samples.
    """
    strategy = current_strategy() if devices is None else strategy_for(devices)
    if isinstance(batch, tuple):
        _check_lengths(batch)
        return tuple(split(part, strategy.devices) for part in batch)
    _check_lengths(batch)
    parts = []
    for index, device in enumerate(strategy.devices):
        with tf.device(device):
            parts.append(part_of(batch, index, len(strategy.devices)))
    return Replicas(parts, strategy.devices)


def distribute(
    dataset: Iterable[Any], devices: DevicesLike = None
) -> Iterator[Any]:
    """Yields the batches of `dataset`, each split by `split`.

    Args:
        dataset: A batched `tf.data.Dataset` or any iterable of batches.
        devices: See `split`.
    """
    for batch in dataset:
        yield split(batch, devices)


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
        length = _length(leaf)
        begin, end = bounds(length, index, count)
        if at_least_one:
            begin = _minimum(begin, length - 1)
            end = length - _minimum(length - end, length - begin - 1)
        return _rows(leaf, begin, end)

    return trees.map_leaves(part, batch)


def sample_count(batch: Tree) -> Any:
    """Returns the number of samples, as a number if it is known."""
    for leaf in trees.flatten(batch):
        if _has_samples(leaf):
            return _length(leaf)
    raise ValueError(
        "A batch needs at least one array of shape (batch, ...). Received: "
        f"{batch!r}."
    )


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


def _rows(leaf: Any, begin: Any, end: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        sizes = tf.concat([[end - begin], leaf.dense_shape[1:]], 0)
        starts = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
        return tf.sparse.slice(leaf, starts, sizes)
    return tf.identity(leaf[begin:end])


def _has_samples(leaf: Any) -> bool:
    return leaf is not None and len(leaf.shape) > 0


def _length(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    static = leaf.shape[0] if leaf.shape else None
    return tf.shape(leaf, tf.int64)[0] if static is None else static


def _check_lengths(batch: Tree) -> None:
    lengths = {}
    for path, leaf in zip(
        trees.paths(batch), trees.flatten(batch), strict=True
    ):
        if leaf is None:
            continue
        shape = getattr(leaf, "shape", None)
        if shape is None or len(shape) == 0:
            raise ValueError(
                "Every leaf of a batch is an array of shape (batch, ...). "
                f"Received at {path}: {leaf!r}."
            )
        lengths[path] = int(_length(leaf))
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{n} at {path}" for path, n in lengths.items())
        raise ValueError(
            f"All leaves of a batch need the same number of samples: {listed}."
        )
