"""The rows of a batch, one per sample, and which of them a replica gets."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees


def shard_of(
    batch: trees.Tree, index: Any, count: int, at_least_one: bool = False
) -> trees.Tree:
    """Returns the shard of a batch that replica `index` of `count` gets.

    The index may be a tensor. `at_least_one` gives a part without rows one.
    """

    def shard(leaf: Any) -> Any:
        if not _has_samples(leaf):
            return leaf
        length = length_of(leaf)
        begin, end = bounds(length, index, count)
        if at_least_one:
            begin = _minimum(begin, length - 1)
            end = length - _minimum(length - end, length - begin - 1)
        return take(leaf, begin, end)

    return trees.map_leaves(shard, batch)


def sample_counts(batch: trees.Tree) -> dict[str, int]:
    """Returns the number of samples of each leaf that has any, by its path."""
    return {
        path: int(length_of(leaf))
        for path, leaf in trees.with_paths(batch)
        if _has_samples(leaf)
    }


def sample_count(batch: trees.Tree, shards: int | None = None) -> int:
    """Returns the number of samples of a batch, in which scalars do not count.

    Leaves may have different numbers if so many shards divide all of them
    evenly. Then the first leaf's is returned.
    """
    lengths = sample_counts(batch)
    if not lengths:
        raise ValueError(
            "A batch needs at least one array of shape (batch, ...). Received: "
            f"{batch!r}."
        )
    sizes = set(lengths.values())
    if len(sizes) > 1 and not (
        shards and all(size and size % shards == 0 for size in sizes)
    ):
        listed = ", ".join(f"{n} at {path}" for path, n in lengths.items())
        or_even = f", or numbers that {shards} divides" if shards else ""
        raise ValueError(
            f"All leaves of a batch need the same number of samples{or_even}, "
            f"as each device gets its part of them: {listed}. Keep other "
            "arrays in the model, or repeat them for each sample."
        )
    return next(iter(lengths.values()))


def bounds(length: Any, index: Any, count: int) -> tuple[Any, Any]:
    """Returns where a replica's shard of `length` samples begins and ends.

    Shards are contiguous and as even as can be; the first ones get one sample
    more where the count does not divide.
    """
    small, extra = length // count, length % count
    begin = index * small + _minimum(index, extra)
    end = (index + 1) * small + _minimum(index + 1, extra)
    return begin, end


def sizes(length: int, count: int) -> list[int]:
    """Returns how many of `length` samples each replica's shard has."""
    limits = [bounds(length, index, count) for index in range(count)]
    return [end - begin for begin, end in limits]


def _minimum(one: Any, other: Any) -> Any:
    if tf.is_tensor(one) or tf.is_tensor(other):
        return tf.minimum(tf.cast(one, tf.int64), tf.cast(other, tf.int64))
    return min(one, other)


def take(leaf: Any, begin: Any, end: Any) -> Any:
    """Returns the samples from `begin` to `end` of one leaf."""
    if isinstance(leaf, tf.SparseTensor):
        sizes = tf.concat([[end - begin], leaf.dense_shape[1:]], 0)
        starts = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
        return tf.sparse.slice(leaf, starts, sizes)
    return tf.identity(leaf[begin:end])


def joined(leaves: Sequence[Any], axis: int = 0) -> Any:
    """Joins leaves along an axis, by default that of samples."""
    if len(leaves) == 1:
        return leaves[0]
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(axis, leaves)
    return tf.concat(leaves, axis)


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


def assert_has_samples(batch: trees.Tree) -> None:
    """Raises unless all leaves are arrays of the same number of samples."""
    for path, leaf in trees.with_paths(batch):
        if leaf is not None and len(getattr(leaf, "shape", ())) == 0:
            raise ValueError(
                "Every leaf of a batch is an array of shape (batch, ...). "
                f"Received: {path} is {leaf!r}. Pass values for the "
                "whole batch as an argument of its own."
            )
    sample_count(batch)
