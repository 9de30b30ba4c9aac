"""What layers keep of their data: the same on all replicas after a step."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux import program
from keras_conflux.strategy import in_replica
from keras_conflux.strategy import reducer


def record_assign(original: Callable, variable: Any, value: Any) -> Any:
    """Remembers which variables a step of `fit` has written."""
    running = program.current()
    if running is not None and running.share is not None:
        running.assigned[id(variable)] = variable
    return original(variable, value)


def average(model: keras.Model, running: program.Program) -> None:
    """Averages the layers' statistics over the replicas, weighted by shares.

    These are the floating-point weights that are not trained and that the
    forward pass has written, such as BatchNormalization's moving mean: each
    replica has moved them towards the statistics of its own samples.
    """
    written = [
        weight
        for weight in model.non_trainable_weights
        if id(weight) in running.assigned
        and weight.aggregation == "none"
        and keras.backend.is_float_dtype(weight.dtype)
    ]
    if not written or reducer().count == 1:
        return
    means = reducer().weighted_sum([w.value for w in written], running.share)
    for weight, mean in zip(written, means, strict=True):
        weight.assign(mean)


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
    running = program.current()
    sums = [
        tf.reduce_sum(part, axis=axes, keepdims=True)
        for part in (x, tf.square(x), tf.ones_like(x))
    ]
    if running is not None and running.share is not None:
        # A replica without samples runs on a stand-in that does not count.
        sums = [tf.where(running.share > 0, part, 0) for part in sums]
    total, squares, count = reducer().all_reduce("sum", sums)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance
