"""What layers keep of their data: the same on all replicas after a step."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._fit.numerics.gradients import is_applying
from keras_conflux._fit.numerics.moving_averages import is_computed_from
from keras_conflux._fit.numerics.moving_averages import is_moving_average
from keras_conflux._replication import step_context
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import reducer


def record_assign(original: Callable, variable: Any, value: Any) -> Any:
    """Remembers which variables a step of `fit` has written.

    What an optimizer writes is the same on all replicas.
    """
    running = _recording()
    if running is not None:
        running.assigned.setdefault(id(variable), variable)
    return original(variable, value)


def record_add(original: Callable, variable: Any, value: Any) -> Any:
    """Remembers what a variable was before a step of `fit` added to it.

    A constant is the same on all replicas, so their copies stay equal without
    help. What is computed from the variable itself moves it somewhere, as a
    gradient moves a trained one; that is no count.
    """
    running = _recording()
    if running is not None and id(variable) not in running.assigned:
        moves = variable.trainable or is_computed_from(value, variable)
        if not moves and not _is_constant(value):
            # Not in the graph of a branch, whose tensors are known there only.
            graph = running.graph
            with graph.as_default() if graph else contextlib.nullcontext():
                running.before[id(variable)] = variable.value + 0
    return original(variable, value)


def _recording() -> step_context.Program | None:
    return None if is_applying() else step_context.current_step()


def _is_constant(value: Any) -> bool:
    if not tf.is_tensor(value):
        return True
    traced = not tf.executing_eagerly()
    return traced and tf.get_static_value(value) is not None


def reduce_states(model: keras.Model, running: step_context.Program) -> None:
    """Makes what layers keep of their data equal on all replicas.

    These are the weights that something else than an optimizer has written.
    What was added to one, such as a count, is added up over the replicas; all
    else, such as BatchNormalization's moving mean, is averaged, weighted by the
    replicas' shares; integers are those of replica 0. Moving averages are left
    for `average`.
    """
    if reducer().count == 1:
        return
    written = [w for w in model.weights if id(w) in running.assigned]
    added = [w for w in written if id(w) in running.before]
    set_anew = [w for w in written if id(w) not in running.before]
    running.averages = [w for w in set_anew if is_moving_average(w)]
    waiting = {id(weight) for weight in running.averages}
    set_anew = [w for w in set_anew if id(w) not in waiting]
    floats = [w for w in set_anew if keras.backend.is_float_dtype(w.dtype)]
    others = [w for w in set_anew if not keras.backend.is_float_dtype(w.dtype)]
    before = [running.before[id(weight)] for weight in added]
    changes = [
        tf.where(running.share > 0, weight.value - old, 0)
        for weight, old in zip(added, before, strict=True)
    ]
    totals = reducer().all_reduce("sum", changes)
    for weight, old, total in zip(added, before, totals, strict=True):
        weight.assign(old + total)
    _average(floats, running.share)
    firsts = reducer().broadcast([w.value for w in others], 0)
    for weight, value in zip(others, firsts, strict=True):
        weight.assign(value)


def average(running: step_context.Program, share: tf.Tensor) -> None:
    """Makes the moving averages of a step equal on all replicas.

    To be called after the last of several steps of the same shares.
    """
    _average(running.averages, share)


def _average(weights: list[keras.Variable], share: tf.Tensor) -> None:
    means = reducer().weighted_sum([w.value for w in weights], share)
    for weight, mean in zip(weights, means, strict=True):
        weight.assign(mean)


def update_mean(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Counts a mean over this replica's samples by the replica's share.

    Then the replicas' updates together are the one update that a single device
    makes with the mean over the whole batch.
    """
    running = step_context.current_step()
    if running is not None:
        values = keras.ops.convert_to_tensor(values)
        if len(values.shape) == 0 and sample_weight is None:
            sample_weight = running.share
    return original(metric, values, sample_weight)


def synchronized_moments(
    original: Callable, x: tf.Tensor, axes: Any, keepdims: bool
) -> Any:
    """Mean and variance over the samples of all replicas, in one reduction.

    Args:
        original: Keras' function, which makes three.
        x: Of shape `(batch, ...)`.
        axes: The axes to reduce.
        keepdims: Whether they stay, with size 1.
    """
    if not in_replica():
        return original(x, axes, keepdims)
    running = step_context.current_step()
    sums = [
        tf.reduce_sum(part, axis=axes, keepdims=True)
        for part in (x, tf.square(x), tf.ones_like(x))
    ]
    if running is not None:
        # A replica without samples runs on a stand-in that does not count.
        sums = [tf.where(running.share > 0, part, 0) for part in sums]
        sums = [_scaled_back(x, running, tf.math.divide_no_nan) for x in sums]
    total, squares, count = reducer().all_reduce("sum", sums)
    if running is not None:
        total = _scaled_back(total, running, tf.multiply)
        squares = _scaled_back(squares, running, tf.multiply)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _scaled_back(
    x: tf.Tensor, running: step_context.Program, scale: Callable
) -> tf.Tensor:
    """Returns `x`; what flows back is scaled by the replica's share.

    A `train_step` that has not called `scale_loss` has its gradients weighted
    when they are applied: too late for what flows to other replicas. So it
    gets the weight on its way out of a replica, and where it has arrived loses
    the weight that it will be given there. Else nothing is scaled.
    """

    @tf.custom_gradient
    def same(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            if running.weighted:
                return dy
            return scale(dy, tf.cast(running.share, dy.dtype))

        return tf.identity(x), gradient

    return same(x)
