"""Makes the weighted mean of the replicas' losses the global loss.

In a step of `fit` each replica computes the loss of its own samples, and what
is reduced is their mean, weighted by the replicas' fractions of the batch.
For a mean over samples that is the loss of the global batch as it stands. A
loss with another denominator is brought to that form here.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._replication import step_context
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import replica_collectives


def scale(original: Callable, value: Any) -> Any:
    """Leaves a mean over this replica's samples as it is.

    Keras divides by the number of replicas, as its optimizer sums gradients.
    """
    return value if step_context.current() is not None else original(value)


def unscale(original: Callable, value: Any) -> Any:
    """Undoes `scale`, for losses that are shown."""
    fraction = _batch_fraction()
    if fraction is not None and len(value.shape) > 0:
        # `reduce_values` divided a loss that is not reduced by the fraction.
        return value * tf.cast(fraction, value.dtype)
    return value if step_context.current() is not None else original(value)


def reduce_values(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """Divides what is not a mean over samples by the batch fraction."""
    fraction = _batch_fraction()
    if fraction is None or len(values.shape) == 0:
        return original(values, sample_weight, reduction)
    fraction = tf.cast(fraction, values.dtype)
    if reduction in (None, "none", "sum"):
        loss = original(values, sample_weight, reduction)
        return tf.math.divide_no_nan(loss, fraction)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = tf.reduce_sum(tf.cast(sample_weight, values.dtype))
        total = replica_collectives().all_reduce(
            "sum", tf.where(fraction > 0, total, 0)
        )
        return tf.math.divide_no_nan(tf.reduce_sum(values), total * fraction)
    return original(values, sample_weight, reduction)


def apply_mask(
    original: Callable,
    sample_weight: Any,
    mask: Any,
    dtype: Any,
    reduction: str | None,
) -> Any:
    """Counts the valid entries of the global batch, not of this replica."""
    fraction = _batch_fraction()
    weight = original(sample_weight, mask, dtype, reduction)
    if (
        fraction is None
        or mask is None
        or reduction
        not in (
            "mean",
            "sum_over_batch_size",
        )
    ):
        return weight
    # `weight` carries total / valid of this replica. Valid entries are not
    # spread over replicas as samples are.
    fraction = tf.cast(fraction, dtype)
    valid = tf.reduce_sum(tf.cast(mask, dtype))
    everywhere = replica_collectives().all_reduce(
        "sum", tf.where(fraction > 0, valid, 0)
    )
    correction = tf.math.divide_no_nan(valid, everywhere * fraction)
    return weight * correction


def _batch_fraction() -> Any:
    context = step_context.current_fit_step()
    return context.batch_fraction if context and in_replica() else None
