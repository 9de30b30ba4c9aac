"""The collectives that a user can call, as one replica makes them.

Inside `fit` a replica may have no samples. It runs on a copy of one then, and
its results are ignored. So the others see nothing of its tree, and it sends
nothing. It sees their trees and, where rows are joined, its own rows behind
theirs: its program is to find them.
"""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Role
from keras_conflux._common import arguments
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._communication.communicator import OneReplica
from keras_conflux._communication.transports.ops import Extreme
from keras_conflux._communication.transports.ops import Op
from keras_conflux._communication.tree_collectives import ReplicaCollectives
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics.gradients import dense
from keras_conflux._fit.numerics.losses import Averages
from keras_conflux._graphs import walks
from keras_conflux._graphs.effects import is_collective
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import has_samples
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.replica_context import replica_rank
from keras_conflux._replication.replica_context import whole_batch_strategy
from keras_conflux._replication.strategy import reduce_by


class Means(steps.Part):
    """The means of a step that are not over samples if parts are uneven."""

    are_of_parts = False
    """Whether replicas count alike in one of values of their own parts."""
    pass_collectives = False
    """Whether one has weights, and is of gradients through collectives."""

    def __init__(self, step: steps.Step) -> None:
        super().__init__(step)
        self.numbers: list[Any] = []
        """The weights that are numbers of Python, and may be alike."""
        self.are_rows = True
        """Whether each of them is the number of rows of the replica's part."""

    def note(self, tree: Tree, weight: Any) -> None:
        """Notes one. Values of gathered rows are not of parts."""
        reductions = steps.UserReductions.of(self.step)
        known = reductions.operations()
        found = [x.op for x in steps.symbolic(trees.flatten(tree))]
        if weight is None:
            self.are_of_parts |= not known or not walks.depends_on(found, known)
        else:
            if isinstance(weight, int | float):
                self.numbers.append(weight)
                parts = steps.symbolic(reductions.own)
                rows = {x.shape[0] for x in parts if x.shape.rank}
                self.are_rows &= weight in rows
            own = {id(each) for each in walks.walked(known, walks.before)}
            self.pass_collectives |= any(
                is_collective(each)
                and id(each) not in own
                and walks.flows_past(
                    each.inputs, reductions.own, lambda _: False, {}
                )
                for each in walks.walked(found, walks.before)
            )


def _warn_of_equal(op: Op, tree: Tree, step: steps.Step) -> None:
    """Warns of sums of what all replicas of `fit` have alike."""
    for leaf in trees.flatten(tree):
        if (
            tf.is_symbolic_tensor(leaf)
            and step.kinds.of(leaf) == EQUAL
            and not walks.is_constant(leaf)
        ):
            step.warn_once(
                "equal",
                f'`allreduce("{op.name}", ...)` of a value that all replicas '
                "have alike counts it once for each. In `fit`, `tape.gradient` "
                "and optimizers have the gradients of the whole batch: leave "
                "the `allreduce` out.",
            )


def _warn_of_averaged(tree: Tree, step: steps.Step) -> None:
    """Warns of gradients that are divided by the number of samples twice."""
    are_gradients = any(
        tf.TensorShape(getattr(leaf, "shape", ())).rank
        for leaf in trees.flatten(tree)
    )
    if are_gradients and Averages.of(step).were_taken:
        step.warn_once(
            "averaged",
            "`tf.nn.compute_average_loss` divides a loss by the number of all "
            'samples, and `allreduce("mean", ...)` divides gradients once '
            'more. Write `allreduce("sum", ...)`, or a plain mean as the loss.',
        )


def allreduce(op: Op, tree: Tree, weight: Any = None) -> Tree:
    """Reduces the trees of the replicas with samples."""
    _check_weight(weight)
    this, present = _this_replica(), has_samples()
    step, of_fit = steps.current(), steps.current_fit_step()
    if steps.in_xla() and op.is_linear:  # which cannot join unknown rows
        tree = trees.map_leaves(dense, tree)
    if step is not None and op.takes_weights:
        _warn_of_averaged(tree, step)
        Means.of(step).note(tree, weight)
    elif of_fit is not None and not isinstance(op, Extreme):
        _warn_of_equal(op, tree, of_fit)
    if weight is None and of_fit is not None and op.takes_weights:
        weight = _share_of_means(tree, of_fit)
    if op.takes_weights and present is not None:
        weight = tf.cast(1 if weight is None else weight, tf.float64)
        weight = tf.where(present, weight, 0)
    elif present is not None:
        seen = functools.partial(_or_neutral, op, present)
        tree = trees.map_leaves(seen, tree)
    reduced = this.all_reduce(op, tree, weight)
    if of_fit is not None:
        of_fit.kinds.mark_equal(trees.present(reduced))
    return reduced


def _share_of_means(tree: Tree, step: steps.Step) -> Any:
    """Returns the weight of means over samples, if a tree has no others."""
    roles = {step.kinds.of(leaf).role for leaf in trees.flatten(tree)}
    are_means = Role.MEAN in roles and roles <= {Role.EQUAL, Role.MEAN}
    return step.batch_fraction if are_means else None


reduce_by(allreduce)


def reduce(op: Op, root: int, tree: Tree) -> Tree:
    """Gives the result of `allreduce` to one replica alone."""
    steps.refuse_in_turns(
        "`reduce` gives one replica what others do not get",
        f'Write `allreduce("{op.name}", ...)`',
    )
    this = _this_replica()
    arguments.assert_root(root, this.count, f"reduce({op.name!r}): ")
    reduced = allreduce(op, tree)
    with tensorflow_tracing.of_rank():
        if this.count > 1 and replica_rank() != root:  # in its dtype
            dtypes = iter([x.dtype for x in trees.present(reduced)])
            reduced = trees.map_leaves(lambda x: tf.cast(x, next(dtypes)), tree)
        reduced = trees.map_leaves(tf.identity, reduced)
    return _keep_of_first(reduced)


def broadcast(root: int, tree: Tree) -> Tree:
    """Sends the tree of a replica, or of the next one that has samples.

    After the last replica comes the first one.
    """
    this, present = _this_replica(), has_samples()
    arguments.assert_root(root, this.count, "broadcast: ")
    if present is None:
        return this.broadcast(tree, root)
    flags = this.all_gather(tf.cast(present, tf.int32), 0)
    distances = (tf.range(this.count) - root) % this.count
    distances = tf.where(flags > 0, distances, this.count)
    sender = tf.argmin(distances, output_type=tf.int32)
    with tensorflow_tracing.of_rank():
        is_sender = tf.equal(sender, replica_rank())
    return this.broadcast_of(tree, is_sender)


def allgather(axis: int, tree: Tree) -> Tree:
    """Joins the trees of the replicas with samples.

    A scalar has its place in the joined vector on any replica. Others see
    zero in the place of a replica without samples.
    """
    this, present = _this_replica(), has_samples()
    step: Any = steps.current_fit_step()
    if present is None or this.count == 1:
        joined = this.all_gather(tree, axis, lambda x: _is_of_samples(x, axis))
        if step is not None:
            step.kinds.mark_equal(trees.present(joined))
        return joined
    # A replica without samples gathers its own rows, too.
    tree = trees.refill(tree, this.gatherable(tree, axis))
    seen = trees.map_leaves(lambda x: _parted(x, axis, present)[0], tree)
    joined = trees.present(this.all_gather(seen, axis))
    pairs = zip(joined, trees.present(tree), strict=True)
    leaves = [_with_own(got, own, axis, present) for got, own in pairs]
    step.kinds.mark_equal(joined)
    step.kinds.whole |= zip(map(id, leaves), joined, strict=True)
    return _keep_of_first(trees.refill(tree, leaves))


def _this_replica() -> ReplicaCollectives:
    """Returns the collectives of the replica that calls."""
    if whole_batch_strategy() is not None:
        return ReplicaCollectives(OneReplica(), 0)
    return replica_collectives()


def _check_weight(weight: Any) -> None:
    """Raises for a weight that would change the shape of the result."""
    if weight is None:
        return
    shape = getattr(weight, "shape", None)
    rank = tf.TensorShape(np.shape(weight) if shape is None else shape).rank
    if rank:
        raise ValueError(
            "allreduce('mean'): `weight` is one number per replica, such as "
            "its number of samples, `len(x)`. Received: "
            f"{trees.describe(tf.convert_to_tensor(weight))}. For weights of "
            "samples, reduce the weighted mean of this replica, with their "
            "sum as its `weight`."
        )


def _keep_of_first(tree: Tree) -> Tree:
    """Marks tensors of which a step of `fit` keeps replica 0's."""
    context = steps.current_fit_step()
    if context is not None:
        context.kinds.mark_own(trees.flatten(tree))
    return tree


def _is_of_samples(leaf: tf.Tensor, axis: int) -> bool:
    """Whether a leaf has as many entries as samples, or a multiple."""
    step = steps.current_fit_step()
    if step is None or not leaf.shape.rank:
        return False
    kind = step.kinds.of(leaf)
    is_along = kind.role is Role.ROWS and kind.axis == axis % leaf.shape.rank
    return is_along and kind.regular


def _or_neutral(op: Op, present: tf.Tensor, leaf: Any) -> Any:
    """Returns a leaf, or the op's neutral element for each number."""
    if isinstance(leaf, tf.IndexedSlices):
        values = _or_neutral(op, present, leaf.values)
        return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)
    try:
        leaf = tf.convert_to_tensor(leaf)
        neutral = op.neutral(leaf.dtype)
    except (TypeError, ValueError):
        return leaf  # is refused, by name, where it is reduced
    return tf.where(present, leaf, neutral)


def _parted(leaf: tf.Tensor, axis: int, present: tf.Tensor) -> tuple[Any, Any]:
    """Returns the part of a leaf that others see, and the rest."""
    if leaf.shape.rank == 0:
        return tf.where(present, leaf, tf.zeros_like(leaf)), leaf
    size = tf.shape(leaf)[axis]
    seen = tf.where(present, size, 0)
    shown, hidden = tf.split(leaf, [seen, size - seen], axis)
    return shown, hidden


def _with_own(
    gathered: tf.Tensor, own: tf.Tensor, axis: int, present: tf.Tensor
) -> tf.Tensor:
    if own.shape.rank == 0:
        with tensorflow_tracing.of_rank():
            here = tf.range(tf.size(gathered)) == replica_rank()
        return tf.where(here, own, gathered)
    return tf.concat([gathered, _parted(own, axis, present)[1]], axis)
