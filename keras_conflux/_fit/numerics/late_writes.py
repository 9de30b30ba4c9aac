"""Writes to the sums of metrics, whose copies add up to the value.

While steps run, each replica counts its own samples.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis import COUNTED
from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._cluster.processes import process_count
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics.global_values import global_values
from keras_conflux._graphs import walks
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step
from keras_conflux._replication.steps import UserReductions

SUMS = ("Add", "AddV2", "Sub")
"""Operations that add a change to a variable's former value."""


def is_counter(variable: keras.Variable) -> bool:
    """Whether the copies of a variable add up to its value."""
    has_copies = replica_collectives().count > 1  # here or elsewhere
    return has_copies and state.is_sum(state.backing(variable))


def own_share(
    variable: keras.Variable, value: Any, step: Step, comes_together: bool
) -> tf.Tensor:
    """Returns this replica's share of a metric variable's new value.

    The copies add up to the value, without the summand of a stand-in.
    """
    value = keras_variables.as_tensor(value, variable.dtype)
    without_samples = None
    try:
        value, without_samples = _share(value, step, comes_together)
    except NotDerivable:
        if step.turns is None:
            _warn_of_rows(variable, step)
    if step.turns is not None:
        value = _share_of_turns(
            variable, value, without_samples, step, comes_together
        )
    elif step.may_be_empty:
        if without_samples is None:
            without_samples = variable.value
        value = tf.where(step.batch_fraction > 0, value, without_samples)
    step.kinds.mark(value, COUNTED)
    return value


def of_rows(variable: keras.Variable, value: Any, step: Step) -> Any:
    """Returns what a replica in a loop writes: without rows, what was there."""
    has_rows = UserReductions.of(step).has_rows
    if has_rows is None or tf.get_static_value(value) is not None:
        return value
    value = keras_variables.as_tensor(value, variable.dtype)
    return tf.where(has_rows, value, variable.value)


def _share_of_turns(
    variable: keras.Variable,
    share: tf.Tensor,
    without_samples: Any,
    step: Step,
    comes_together: bool,
) -> tf.Tensor:
    """Returns the share of a replica, which it writes once after its turns.

    It is refused if the graph does not show each turn's summand.
    """
    if share is without_samples:
        return share
    adds = share.op.type in SUMS and share.op.inputs[0] is without_samples
    if without_samples is None or not comes_together:
        raise NotImplementedError(
            f"{step.name}: the graph does not show what a microbatch adds to "
            f"{variable.path}, so turns cannot add it up. Add to it in one "
            "`assign_add`, outside of branches and loops, or leave out "
            "`microbatches`."
        )
    change = share - without_samples
    if adds:
        sign = -1 if share.op.type == "Sub" else 1
        change = sign * share.op.inputs[1]
    if step.may_be_empty:
        change = tf.where(step.batch_fraction > 0, change, 0)
    return without_samples + step.turns.summed_here(change)


def _share(
    value: tf.Tensor, step: Step, comes_together: bool
) -> tuple[tf.Tensor, Any]:
    """Returns parts that add up to the value that one device would set.

    These are the part of a replica, and of one that has no samples, if it is
    known. Raises `NotDerivable` if replicas cannot compute the summand.
    """
    terms = list(value.op.inputs) if value.op.type in SUMS else [value]
    kinds = [step.kinds.of(term) for term in terms]
    kept = [kind == COUNTED for kind in kinds]
    if all(kept):
        return value, value
    if any(kept):
        at = kept.index(False)
        subtracts = value.op.type == "Sub"
        change = _share_of_change(terms[at], kinds[at], step, comes_together)
        if change is not terms[at]:
            terms[at] = change
            value = terms[0] - terms[1] if subtracts else terms[0] + terms[1]
        before = terms[1 - at]
        return value, -before if subtracts and at == 0 else before
    kind = step.kinds.of(value)
    part = _share_of_change(value, kind, step, comes_together)
    is_sum = kind.role in (Role.TOTAL, Role.COUNT) or part is not value
    return part, tf.zeros_like(part) if is_sum else None


def _share_of_change(
    change: tf.Tensor, kind: Kind, step: Step, comes_together: bool
) -> tf.Tensor:
    if kind.role in (Role.DERIVED, Role.RANDOM):
        if not comes_together:
            raise NotDerivable(change.name)
        # As a root of a mean, or a largest value: the first copy has all of
        # it, as of values that are equal on all.
        change, kind = global_values([change], step)[0], EQUAL
    if kind == EQUAL:
        with tensorflow_tracing.of_rank():
            return tf.where(has_first(step), change, 0)
    if kind.role is Role.MEAN and change.dtype.is_floating:
        return change * tf.cast(step.batch_fraction, change.dtype)
    return change


def _warn_of_rows(variable: keras.Variable, step: Step) -> None:
    name = variable.path.rpartition("/")[0] or variable.path
    step.warn_once(
        f"metric {name}",
        f"the metric {name!r} gets rows that depend on other samples of "
        "the batch, in a way that replicas cannot reproduce for the whole "
        "batch, so each counts only its own part. Give it the rows of all "
        "replicas, with `keras_conflux.allgather`, or rows of single samples.",
    )


def has_first(step: Step) -> Any:
    """Whether a replica has the first samples of the global batch.

    Where processes bring their own parts, replica 0 may have none.
    """
    if process_count() == 1 or not step.may_be_empty:
        return rank_as_tensor() == 0
    return (step.batch_fraction > 0) & (step.place().before == 0)


def is_made_of(value: Any, variable: keras.Variable) -> bool:
    """Whether a traced value depends on the old value of a replica's copy."""
    if not tf.is_tensor(value):
        return False
    # The placeholder for its handle is made at the first use, and found again.
    graph: Any = tf.compat.v1.get_default_graph()
    handle = graph.capture(state.own_copy(variable).handle)
    return walks.depends_on([value.op], _reads(handle))


def adds(write: tf.Operation) -> bool:
    """Whether a write, as far as it shows, adds to a copy or makes it zero."""
    if write.type != "AssignVariableOp":
        return True
    value = write.inputs[1]
    known = tf.get_static_value(value)
    if known is not None:
        return not known.any()
    return _is_sum_with(value, _reads(write.inputs[0]))


def _reads(handle: tf.Tensor) -> list[tf.Operation]:
    return [x for x in handle.consumers() if x.type == "ReadVariableOp"]


def _is_sum_with(value: tf.Tensor, reads: list[tf.Operation]) -> bool:
    kind, given = value.op.type, value.op.inputs
    if kind == "SelectV2":
        return all(_is_sum_with(x, reads) for x in given[1:])
    if kind in (*SUMS, "Identity", "Cast"):
        terms = [x for x in given if walks.depends_on([x.op], reads)]
        return len(terms) == 1 and _is_sum_with(terms[0], reads)
    return kind == "ReadVariableOp"


def adds_one(write: tf.Operation) -> bool:
    """Whether a write adds one to a copy, whatever the replica's part has."""
    is_added = write.type == "AssignAddVariableOp"
    if not is_added and write.type != "AssignVariableOp":
        return False
    value = write.inputs[1]
    if value.op.type == "SelectV2":  # of `of_rows`
        value = value.op.inputs[1]
    terms = value.op.inputs if value.op.type in SUMS else [value] * is_added
    return any(np.array_equal(tf.get_static_value(x), 1) for x in terms)
