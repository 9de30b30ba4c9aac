"""The moments of synchronized batch normalization, over all replicas."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import replica_collectives


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
    context = step_context.current_fit_step()
    sums = [
        tf.reduce_sum(part, axis=axes, keepdims=True)
        for part in (x, tf.square(x), tf.ones_like(x))
    ]
    if context is not None:
        # A replica without samples runs on a stand-in that does not count.
        sums = [tf.where(context.batch_fraction > 0, part, 0) for part in sums]
        divide = tf.math.divide_no_nan
        sums = [_gradient_scaled(part, context, divide) for part in sums]
    total, squares, count = replica_collectives().all_reduce("sum", sums)
    if context is not None:
        total = _gradient_scaled(total, context, tf.multiply)
        squares = _gradient_scaled(squares, context, tf.multiply)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _gradient_scaled(
    x: tf.Tensor, context: StepContext, scale: Callable
) -> tf.Tensor:
    """Returns `x`, whose gradient is scaled by the replica's batch fraction.

    A `train_step` that has not called `scale_loss` has its gradients weighted
    when they are applied: too late for what flows to other replicas. So it
    gets the weight on its way out of a replica, and where it has arrived loses
    the weight that it will be given there. Else nothing is scaled.
    """

    @tf.custom_gradient
    def same(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            if context.scaled:
                return dy
            return scale(dy, tf.cast(context.batch_fraction, dy.dtype))

        return tf.identity(x), gradient

    return same(x)
