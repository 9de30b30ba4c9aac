"""Makes the weighted mean of the replicas' losses the global loss.

A loss with another denominator is brought to the form of a mean over samples.
Values for metrics of a mean are marked here, if the graph shows no kind.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import COUNT
from keras_conflux._batch_analysis import MEAN
from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import derivation_of
from keras_conflux._batch_analysis import kind_by_trial
from keras_conflux._batch_analysis import rows
from keras_conflux._compat import keras_variables
from keras_conflux._fit.numerics import warnings
from keras_conflux._fit.numerics.returns import Logs
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.strategy import ReplicatedStrategy


def scale(original: Callable, value: Any) -> Any:
    """Leaves a mean over this replica's samples as it is.

    Keras divides by the number of replicas, as its optimizer sums gradients.
    In a scope, outside of replicas, nothing is summed.
    """
    strategy = tf.distribute.get_strategy()
    in_scope = isinstance(strategy, ReplicatedStrategy) and not in_replica()
    is_whole = in_scope or steps.current() is not None
    return value if is_whole else original(value)


def reduce_values(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """Divides a value that is no mean over samples by the batch fraction."""
    step = _step()
    if (
        step is None
        or len(values.shape) == 0
        or reduction in (None, "none")
        or not _are_of_samples(values, step)
    ):
        return original(values, sample_weight, reduction)
    fraction = tf.cast(step.batch_fraction, values.dtype)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = tf.reduce_sum(tf.cast(sample_weight, values.dtype))
        total = _of_all(total, fraction, step)
        loss = tf.math.divide_no_nan(tf.reduce_sum(values), total * fraction)
    else:
        loss = original(values, sample_weight, reduction)
        if reduction == "sum":
            loss = tf.math.divide_no_nan(loss, fraction)
    step.kinds.mark(loss, MEAN)
    return loss


class Averages(steps.Part):
    """Whether a step has called `tf.nn.compute_average_loss`."""

    were_taken = False


def compute_average(
    original: Callable,
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    """Leaves `tf.nn.compute_average_loss` a mean over this replica's samples.

    TensorFlow divides by the number of replicas, for gradients to be summed.
    """
    average = original(per_example_loss, sample_weight, global_batch_size)
    step = steps.current()
    if step is not None:
        Averages.of(step).were_taken = True
    if _step() is None or global_batch_size is not None:
        return average
    return average * _replicas()


def scale_penalty(original: Callable, regularization_loss: Any) -> Any:
    """Keeps a loss that is equal on all replicas unchanged."""
    scaled = original(regularization_loss)
    return scaled if _step() is None else scaled * _replicas()


def apply_mask(
    original: Callable,
    sample_weight: Any,
    mask: Any,
    dtype: Any,
    reduction: str | None,
) -> Any:
    """Counts the valid entries of the global batch, not of this replica."""
    step = _step()
    weight = original(sample_weight, mask, dtype, reduction)
    means = ("mean", "sum_over_batch_size")
    if (
        step is None
        or mask is None
        or reduction not in means
        or not _are_of_samples(mask, step)
    ):
        return weight
    # `weight` carries total / valid of this replica. Valid entries are not
    # spread over replicas as samples are.
    fraction = tf.cast(step.batch_fraction, dtype)
    valid = tf.reduce_sum(tf.cast(mask, dtype))
    everywhere = _of_all(valid, fraction, step)
    correction = tf.math.divide_no_nan(valid, everywhere * fraction)
    corrected = weight * correction
    step.kinds.mark(corrected, step.kinds.of(mask))
    return corrected


def _of_all(own: tf.Tensor, fraction: tf.Tensor, step: steps.Step) -> tf.Tensor:
    """Returns the sum over replicas that have samples."""
    own = tf.where(fraction > 0, own, 0)
    total = replica_collectives().all_reduce("sum", own)
    step.kinds.mark_equal([total])  # as no graph shows where sizes are known
    return total


def _are_of_samples(values: tf.Tensor, step: steps.Step) -> bool:
    """Whether values are, as far as one knows, one device's for its samples."""
    kind = kind_by_trial(values, step.kinds)
    if kind.role is Role.OPAQUE:
        warnings.warn_of_unknown_values(
            step, "values of a loss", "the input of a loss"
        )
        return True
    is_rows = kind.role is Role.ROWS and not kind.depends_on_other_samples
    return is_rows and kind.regular  # a mean over some rows counts those


def _replicas() -> int:
    return tf.distribute.get_strategy().num_replicas_in_sync


def _step() -> steps.Step | None:
    step = steps.current_fit_step()
    return step if step is not None and in_replica() else None


def update_mean(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Takes unknown values for rows of samples, or for a mean over them.

    Known values need nothing: variables get a share of one device's summand.
    """
    step = steps.current_fit_step()
    if step is None:
        return original(metric, values, sample_weight)
    Logs.of(step).note_metric(metric)
    values = keras_variables.as_tensor(values)
    values = _taken_for(MEAN, values, metric, step)
    if sample_weight is not None:
        weight = keras_variables.as_tensor(sample_weight)
        sample_weight = _taken_for(COUNT, weight, metric, step)
    return original(metric, values, sample_weight)


def _taken_for(
    kind: Kind, value: tf.Tensor, metric: Any, step: steps.Step
) -> tf.Tensor:
    """Returns a value of a known kind: if need be, that it is taken for."""
    role = kind_by_trial(value, step.kinds).role
    is_number = value.shape.rank == 0
    if role is not Role.OPAQUE and not (is_number and role is Role.DERIVED):
        return value
    with contextlib.suppress(NotDerivable):
        derivation_of(value, step.kinds)
        return value
    if role is Role.OPAQUE:
        warnings.warn_of_input(step, metric, value)
    else:
        Logs.of(step).unknown_inputs.append((metric, value))
    value = tf.identity(value)  # a loss keeps its kind
    step.kinds.mark(value, kind if is_number else rows(0))
    return value
