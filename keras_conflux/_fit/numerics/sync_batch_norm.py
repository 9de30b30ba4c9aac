"""What batch normalization computes from the samples of several replicas."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._replication import step_context
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
    total, squares, count = replica_collectives().all_reduce("sum", sums)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def call(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Says that what the layer returns is one row per sample.

    Without `synchronized=True` each row depends on the other samples of the
    replica's shard. That is what the user has chosen.
    """
    outputs = original(layer, *args, **kwargs)
    context = step_context.current_fit_step()
    if context is not None:
        kind = context.kinds.of(args[0] if args else kwargs["inputs"])
        context.kinds.mark(outputs, kind)
        context.statistics.update(map(id, layer.non_trainable_variables))
    return outputs
