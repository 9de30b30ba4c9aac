"""What batch normalization computes from the samples of several replicas."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_models
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
    total, squares, count = _sums_of_all(
        (x, tf.square(x), tf.ones_like(x)), axes
    )
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def masked_moments(
    original: Callable, layer: Any, inputs: tf.Tensor, mask: Any
) -> Any:
    """The same of what a mask leaves, where Keras takes a replica's alone.

    The variance needs the mean first, as on one device.

    Args:
        original: The layer's method.
        layer: A `BatchNormalization`.
        inputs: Of shape `(batch, ...)`.
        mask: Of one dimension less, or `None`.
    """
    if mask is None or not layer.synchronized or not in_replica():
        return original(layer, inputs, mask)
    axes = keras_models.reduction_axes(layer)
    kept = tf.cast(tf.expand_dims(mask, -1), tf.bool) & tf.ones_like(
        inputs, tf.bool
    )
    total, count = _sums_of_all(
        (tf.where(kept, inputs, 0), tf.cast(kept, inputs.dtype)),
        axes,
    )
    count += tf.cast(keras.config.epsilon(), count.dtype)
    mean = total / count
    deviations = tf.where(kept, tf.square(inputs - mean), 0)
    (squares,) = _sums_of_all([deviations], axes)
    return tf.squeeze(mean, axes), tf.squeeze(squares / count, axes)


def _sums_of_all(parts: Iterable[tf.Tensor], axes: Any) -> list[tf.Tensor]:
    """Returns sums over the samples of all replicas, axes of size 1 kept.

    A replica without samples runs on a stand-in that does not count.
    """
    sums = [tf.reduce_sum(part, axes, keepdims=True) for part in parts]
    context = step_context.current_fit_step()
    if context is not None:
        sums = [tf.where(context.batch_fraction > 0, part, 0) for part in sums]
    return replica_collectives().all_reduce("sum", sums)


def call(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Says that what the layer returns is one row per sample.

    Without `synchronized=True` each row depends on the other samples of the
    replica's shard. That is what the user has chosen.
    """
    context = step_context.current_fit_step()
    if context is not None:
        context.statistics.update(map(id, layer.non_trainable_variables))
    outputs = original(layer, *args, **kwargs)
    if context is not None:
        kind = context.kinds.of(args[0] if args else kwargs["inputs"])
        context.kinds.mark(outputs, kind)
    return outputs
