"""Collectives of a user's inside `fit`, where a replica may have no samples.

A replica without samples runs on a copy of one, and what it computes is
ignored. So the others see nothing of what it gives, and it sends nothing. It
sees what they gave and, where rows are joined, its own rows behind theirs: its
program is to find them.
"""

import functools
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._communication.tree_collectives import ReplicaCollectives
from keras_conflux._replication import steps
from keras_conflux._replication.strategy import replica_rank


def has_samples() -> tf.Tensor | None:
    """Whether this replica has samples, or `None` if all replicas must."""
    step = steps.current_fit_step()
    if step is None:
        return None
    known = tf.get_static_value(step.batch_fraction)
    return None if known else step.batch_fraction > 0


def all_reduce(
    this: ReplicaCollectives, op: str, tree: Tree, weight: Any = None
) -> Tree:
    """Reduces what the replicas with samples give."""
    present = has_samples()
    if present is None:
        return this.all_reduce(op, tree, weight)
    if op == "mean":
        weight = tf.cast(1 if weight is None else weight, tf.float64)
        return this.all_reduce(op, tree, tf.where(present, weight, 0))
    return this.all_reduce(op, _else_neutral(op, tree, present), weight)


def broadcast(this: ReplicaCollectives, tree: Tree, root: int) -> Tree:
    """Sends the tree of a replica, or of the next one that has samples.

    After the last replica comes the first one.
    """
    present = has_samples()
    if present is None:
        return this.broadcast(tree, root)
    flags = this.all_gather(tf.cast(present, tf.int32), 0)
    distances = (tf.range(this.count) - root) % this.count
    distances = tf.where(flags > 0, distances, this.count)
    sender = tf.argmin(distances, output_type=tf.int32)
    return this.broadcast_of(tree, tf.equal(sender, replica_rank()))


def all_gather(this: ReplicaCollectives, tree: Tree, axis: int) -> Tree:
    """Joins what the replicas with samples give.

    A scalar has its place in the joined vector on any replica. Others see
    zero in the place of a replica without samples.
    """
    present = has_samples()
    if present is None or this.count == 1:
        return this.all_gather(tree, axis, lambda x: _is_of_samples(x, axis))
    try:
        tree = trees.map_leaves(tf.convert_to_tensor, tree)
    except (TypeError, ValueError):
        return this.all_gather(tree, axis)  # which says what is wrong
    if any(not _has_axis(leaf, axis) for leaf in trees.present(tree)):
        return this.all_gather(tree, axis)
    seen = trees.map_leaves(lambda x: _parted(x, axis, present)[0], tree)
    gathered = this.all_gather(seen, axis)
    leaves = [
        _with_own(got, own, axis, present)
        for got, own in zip(
            trees.present(gathered), trees.present(tree), strict=True
        )
    ]
    return trees.refill(tree, leaves)


def _is_of_samples(leaf: tf.Tensor, axis: int) -> bool:
    """Whether a leaf has as many entries as samples, or a multiple of them.

    All replicas have as many where all have some, as in what XLA compiles.
    """
    step = steps.current_fit_step()
    if step is None or not leaf.shape.rank:
        return False
    return step.kinds.is_regular_along(leaf, axis % leaf.shape.rank)


def _else_neutral(op: str, tree: Tree, present: tf.Tensor) -> Tree:
    return trees.map_leaves(functools.partial(_or_neutral, op, present), tree)


def _or_neutral(op: str, present: tf.Tensor, leaf: Any) -> Any:
    """Returns a leaf, or what changes nothing in the place of each number."""
    if isinstance(leaf, tf.IndexedSlices):
        values = _or_neutral(op, present, leaf.values)
        return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)
    try:
        leaf = tf.convert_to_tensor(leaf)
        neutral = tf.constant(_neutral(op, leaf.dtype), leaf.dtype)
    except (TypeError, ValueError):
        return leaf  # is refused, by name, where it is reduced
    return tf.where(present, leaf, neutral)


def _neutral(op: str, dtype: tf.DType) -> Any:
    if op in ("sum", "product"):
        return 0 if op == "sum" else 1
    if dtype.is_floating:
        return float("inf") if op == "min" else float("-inf")
    return dtype.max if op == "min" else dtype.min


def _has_axis(leaf: tf.Tensor, axis: int) -> bool:
    rank = leaf.shape.rank
    return rank is not None and axis in range(-max(rank, 1), max(rank, 1))


def _parted(leaf: tf.Tensor, axis: int, present: tf.Tensor) -> tuple[Any, Any]:
    """Returns what others see of a leaf, and what they do not."""
    if leaf.shape.rank == 0:
        nothing = tf.zeros_like(leaf)
        return tf.where(present, leaf, nothing), leaf
    size = tf.shape(leaf)[axis]
    seen = tf.where(present, size, 0)
    shown, hidden = tf.split(leaf, [seen, size - seen], axis)
    return shown, hidden


def _with_own(
    gathered: tf.Tensor, own: tf.Tensor, axis: int, present: tf.Tensor
) -> tf.Tensor:
    if own.shape.rank == 0:
        here = tf.range(tf.size(gathered)) == replica_rank()
        return tf.where(here, own, gathered)
    return tf.concat([gathered, _parted(own, axis, present)[1]], axis)
