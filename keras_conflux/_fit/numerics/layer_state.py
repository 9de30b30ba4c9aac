"""Makes what a step keeps in variables what one device would keep."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import COUNTED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics import branches
from keras_conflux._fit.numerics import inner_writes
from keras_conflux._fit.numerics import trace_findings
from keras_conflux._fit.numerics.inner_writes import SUMS
from keras_conflux._fit.numerics.moving_averages import is_computed_from
from keras_conflux._fit.numerics.moving_averages import is_moving_average
from keras_conflux._replication import state
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import is_replicated
from keras_conflux._replication.strategy import rank_in_trace
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import replica_index


def record_assign(original: Callable, variable: Any, value: Any) -> Any:
    """Records which variables a step of `fit` has written.

    What an optimizer writes is the same on all replicas. What a stand-in for
    samples would add to a metric is left out.
    """
    context = _recording()
    if context is None:
        return original(variable, value)
    comes_together = branches.choose_together(context)
    trace_findings.note_write(context, variable, value)
    context.assigned.setdefault(id(variable), variable)
    if not context.internal:
        context.kept.setdefault(id(variable), variable)
    context.kinds.notice(tf.compat.v1.get_default_graph())
    if _is_counter(variable):
        value = _counted(variable, value, context)
    else:
        value = inner_writes.exchanged(variable, value, context, comes_together)
    return original(variable, value)


def _is_counter(variable: keras.Variable) -> bool:
    has_copies = replica_collectives().count > 1  # here or elsewhere
    return has_copies and not state.is_mirrored(variable)


def _counted(
    variable: keras.Variable, value: Any, context: StepContext
) -> tf.Tensor:
    """Returns this replica's part of what a metric's variable is set to.

    The copies add up to the value. What a stand-in for samples would add is
    left out.
    """
    value = keras_variables.as_tensor(value, variable.dtype)
    of_keras = context.is_counter_of_keras(variable)
    value, without_samples = _part(value, context, of_keras)
    if context.may_be_empty:
        if without_samples is None:
            without_samples = variable.value
        value = tf.where(context.batch_fraction > 0, value, without_samples)
    context.kinds.mark(value, COUNTED)
    return value


def _part(
    value: tf.Tensor, context: StepContext, is_sum: bool
) -> tuple[tf.Tensor, Any]:
    """Returns parts that add up to what one device would set.

    Args:
        value: What a replica would set.
        context: Of the step.
        is_sum: Whether what is added is known to be a sum over samples, if
            the graph does not show it.

    Returns:
        The part of a replica, and of one that has no samples, if it is known.
    """
    terms = list(value.op.inputs) if value.op.type in SUMS else [value]
    kinds = [context.kinds.of(term) for term in terms]
    kept = [kind == COUNTED for kind in kinds]
    if all(kept):
        return value, value
    if kept == [True, False]:
        if is_sum and kinds[1].role is Role.DERIVED:
            return value, terms[0]
        change = _part_of_change(terms[1], kinds[1], context)
        if change is not terms[1]:
            adds = value.op.type != "Sub"
            value = terms[0] + change if adds else terms[0] - change
        return value, terms[0]
    if any(kept):
        return value, None
    kind = context.kinds.of(value)
    part = _part_of_change(value, kind, context)
    is_sum = kind.role in (Role.TOTAL, Role.COUNT) or part is not value
    return part, tf.zeros_like(part) if is_sum else None


def _part_of_change(
    change: tf.Tensor, kind: Kind, context: StepContext
) -> tf.Tensor:
    if kind.role is Role.DERIVED:
        # As a root of a mean, or a largest value: the first copy has all of
        # it, as it has what is equal on all.
        with contextlib.suppress(CannotTell):
            change, kind = global_values([change], context)[0], EQUAL
    if kind == EQUAL:
        return _if_first(change, context)
    if kind.role is Role.MEAN and change.dtype.is_floating:
        return change * tf.cast(context.batch_fraction, change.dtype)
    return change


def _if_first(value: tf.Tensor, context: StepContext) -> tf.Tensor:
    """Returns a value on the replica of the first samples, zeros elsewhere."""
    has_first = _has_first(context)
    return value if has_first is True else tf.where(has_first, value, 0)


def _has_first(context: StepContext) -> Any:
    """Whether a replica has the first samples of the global batch.

    Where processes bring their own parts, replica 0 may have none.
    """
    if process_count() == 1 or not context.may_be_empty:
        return rank_in_trace() == 0
    return (context.batch_fraction > 0) & (context.place().before == 0)


def record_add(original: Callable, variable: Any, value: Any) -> Any:
    """Records what a variable was before a step of `fit` first added to it.

    Only where the graph of the step does not show what is added, as in graphs
    inside of it. There, a value computed from the batch, such as a sample
    count, is summed over the replicas, and a value computed from the variable
    itself, such as `v -= 0.1 * (v - mean)`, is averaged.
    """
    context = _recording()
    if (
        context is not None
        and id(variable) not in context.assigned
        and not _is_traced_by(context)
    ):
        value = _read(value)
        moves = variable.trainable or is_computed_from(value, variable)
        if not moves and not _is_constant(value):
            # Not in the graph of a branch, whose tensors are known there only.
            with context.graph.as_default():
                context.before[id(variable)] = variable.value + 0
    return original(variable, value)


def _recording() -> StepContext | None:
    context = step_context.current_fit_step()
    if context is None or context.optimizing or tf.executing_eagerly():
        return None  # in `tf.init_scope`, it is written once, and not by steps
    return context


def _is_traced_by(context: StepContext) -> bool:
    if context.kinds.is_blind:
        return False
    return context.graph is tf.compat.v1.get_default_graph()


def _read(value: Any) -> Any:
    """Returns what a variable holds, if a step adds one to another."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    return keras_variables.as_tensor(value) if is_variable else value


def _is_constant(value: Any) -> bool:
    if not tf.is_tensor(value):
        return True
    return tf.get_static_value(value) is not None


def reduce_states(context: StepContext) -> None:
    """Makes what a step has written equal on all replicas.

    These are the variables that something else than an optimizer has written,
    weights or others, such as a learning rate. A value that no sample has
    touched is equal already. Others are computed as one device would compute
    them. Moving averages are left for `average`.
    """
    if replica_collectives().count == 1:
        return
    replicated = [
        variable
        for variable in context.kept.values()
        if is_replicated(keras_variables.backing(variable))
    ]
    _assert_counted_together([*filter(_is_counter, replicated)], context)
    written = [*itertools.filterfalse(_is_counter, replicated)]
    exact: list[tuple[keras.Variable, tf.Tensor]] = []
    unclear: list[keras.Variable] = []
    for weight in written:
        values, traced_here = _values(weight, context)
        if _are_equal(values, traced_here, context):
            continue
        if is_moving_average(weight, context):
            context.averages.append(weight)
        elif values and traced_here:
            exact.append((weight, values[-1]))
        else:
            if values and not inner_writes.are_averaged_well(
                weight, values, context
            ):
                _warn_of_inner_write(context, weight)
            unclear.append(weight)
    for weight, value in exact:
        try:
            weight.assign(global_values([value], context)[0])
        except CannotTell:
            _warn_of_weight(context, weight)
            unclear.append(weight)
    _reduce_by_change(unclear, context)


def _assert_counted_together(
    counters: list[keras.Variable], context: StepContext
) -> None:
    """Warns of what metrics count where replicas may not come together."""
    for counter in counters:
        values, _ = _values(counter, context)
        if not all(
            branches.is_everywhere(value.graph, context, repeated=True)
            for value in values
        ):
            _warn_of_inner_write(context, counter)


def _are_equal(
    values: list[tf.Tensor], traced_here: bool, context: StepContext
) -> bool:
    """Whether all replicas surely write the same, wherever they write it."""
    if traced_here:
        values = values[-1:]
    return bool(values) and all(
        context.kinds.of(value) == EQUAL
        and branches.is_everywhere(value.graph, context, repeated=True)
        for value in values
    )


def settle(variables: list[Any], context: StepContext) -> None:
    """Makes what a step has set variables to what one device would have set.

    To be called before an optimizer adds to them.
    """
    for weight in variables:
        if id(weight) not in context.assigned:
            continue
        values, traced_here = _values(weight, context)
        if not values or not traced_here:
            continue
        if context.kinds.of(values[-1]) == EQUAL:
            continue
        # If it cannot be computed, they are averaged at the end of the step.
        with contextlib.suppress(CannotTell):
            weight.assign(global_values(values[-1:], context)[0])


def _values(
    weight: keras.Variable, context: StepContext
) -> tuple[list[tf.Tensor], bool]:
    """Returns what was written to this replica's copy of a weight."""
    if context.kinds.is_blind:
        return [], False
    copy = state.copies(weight)[replica_index()]
    return context.kinds.written(tensorflow_internals.handle_of(copy))


def _reduce_by_change(
    weights: list[keras.Variable], context: StepContext
) -> None:
    """Sums what was added, averages what was set; integers are replica 0's."""
    collectives = replica_collectives()
    added = [w for w in weights if id(w) in context.before]
    replaced = [w for w in weights if id(w) not in context.before]
    floats = [w for w in replaced if keras.backend.is_float_dtype(w.dtype)]
    others = [w for w in replaced if not keras.backend.is_float_dtype(w.dtype)]
    before = [context.before[id(weight)] for weight in added]
    changes = [
        tf.where(context.batch_fraction > 0, weight.value - old, 0)
        for weight, old in zip(added, before, strict=True)
    ]
    totals = collectives.all_reduce("sum", changes)
    for weight, old, total in zip(added, before, totals, strict=True):
        weight.assign(old + total)
    _average(floats, context.batch_fraction)
    firsts = collectives.broadcast_of(
        [w.value for w in others], _has_first(context)
    )
    for weight, value in zip(others, firsts, strict=True):
        weight.assign(value)


def _warn_of_weight(context: StepContext, weight: keras.Variable) -> None:
    context.warn_once(
        f"weight {weight.path}",
        f"the graph does not show how {weight.path}, which the step sets, is "
        "computed from the samples. The replicas' values are "
        "averaged, and integers are those of replica 0. Compute it from "
        "`keras_conflux.allreduce` or `keras_conflux.allgather` of what the "
        "replicas have.",
    )


def _warn_of_inner_write(context: StepContext, weight: keras.Variable) -> None:
    context.warn_once(
        f"weight {weight.path}",
        f"the step writes {weight.path} in a loop, or in a branch that each "
        "replica chooses by its own samples, or with what cannot be computed "
        "there from those of all. What is added is summed, what is set is "
        "averaged, and integers that are set are those of replica 0, which one "
        "device may set to another value. Write it once, outside, as in "
        "`v.assign(keras.ops.where(condition, new, v))`.",
    )


def average(context: StepContext, fraction: tf.Tensor) -> None:
    """Makes the moving averages of a step equal on all replicas.

    To be called after the last of several steps of the same fractions.
    """
    _average(context.averages, fraction)


def _average(weights: list[keras.Variable], fraction: tf.Tensor) -> None:
    means = replica_collectives().weighted_sum(
        [w.value for w in weights], fraction
    )
    for weight, mean in zip(weights, means, strict=True):
        weight.assign(mean)
