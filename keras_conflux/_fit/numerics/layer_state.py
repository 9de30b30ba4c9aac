"""Makes what layers keep of their data equal on all replicas after a step."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._fit.numerics.moving_averages import is_computed_from
from keras_conflux._fit.numerics.moving_averages import is_moving_average
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_collectives


def record_assign(original: Callable, variable: Any, value: Any) -> Any:
    """Records which variables a step of `fit` has written.

    What an optimizer writes is the same on all replicas.
    """
    context = _recording()
    if context is not None:
        context.assigned.setdefault(id(variable), variable)
    return original(variable, value)


def record_add(original: Callable, variable: Any, value: Any) -> Any:
    """Records what a variable was before a step of `fit` first added to it.

    There are three kinds of increment. A constant, such as a step counter, is
    equal on every replica and needs no reduction. A value computed from the
    batch, such as a sample count, is summed over the replicas: it is recorded
    here. A value computed from the variable itself, such as
    `v -= 0.1 * (v - mean)`, moves the variable towards a target, as gradients
    move a trained one; it is averaged instead.
    """
    context = _recording()
    if context is not None and id(variable) not in context.assigned:
        moves = variable.trainable or is_computed_from(value, variable)
        if not moves and not _is_constant(value):
            # Not in the graph of a branch, whose tensors are known there only.
            graph = context.graph
            with graph.as_default() if graph else contextlib.nullcontext():
                context.before[id(variable)] = variable.value + 0
    return original(variable, value)


def _recording() -> StepContext | None:
    context = step_context.current_fit_step()
    return None if context is None or context.optimizing else context


def _is_constant(value: Any) -> bool:
    if not tf.is_tensor(value):
        return True
    traced = not tf.executing_eagerly()
    return traced and tf.get_static_value(value) is not None


def reduce_states(model: keras.Model, context: StepContext) -> None:
    """Makes what layers keep of their data equal on all replicas.

    These are the weights that something else than an optimizer has written.
    What was added to one, such as a count, is summed over the replicas; all
    else, such as BatchNormalization's moving mean, is averaged, weighted by the
    replicas' fractions of the batch; integers are those of replica 0. Moving
    averages are left for `average`.
    """
    collectives = replica_collectives()
    if collectives.count == 1:
        return
    written = [w for w in model.weights if id(w) in context.assigned]
    added = [w for w in written if id(w) in context.before]
    replaced = [w for w in written if id(w) not in context.before]
    context.averages = [w for w in replaced if is_moving_average(w)]
    waiting = {id(weight) for weight in context.averages}
    replaced = [w for w in replaced if id(w) not in waiting]
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
    firsts = collectives.broadcast([w.value for w in others], 0)
    for weight, value in zip(others, firsts, strict=True):
        weight.assign(value)


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
