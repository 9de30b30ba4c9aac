"""Gives metrics the numbers of which one device would take the mean."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._custom_loops.collectives import UserReductions
from keras_conflux._fit.global_batch import trial
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics import unread_code
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext


def update_mean(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Makes the replicas' updates add up to the one that a device makes.

    What has no samples any more, such as the mean of a loss, counts by the
    replica's fraction of the batch, and so does what compares samples: each
    replica then has the values of one device.
    """
    context = step_context.current_fit_step()
    if context is None:
        return original(metric, values, sample_weight)
    if context.note_metric is not None:
        context.note_metric(metric)
    values = keras_variables.as_tensor(values)
    if sample_weight is not None:
        sample_weight = keras_variables.as_tensor(sample_weight)
    values, sample_weight = _of_device(
        metric.name, values, sample_weight, context
    )
    return original(metric, values, sample_weight)


def _of_device(
    name: str,
    values: tf.Tensor,
    weight: tf.Tensor | None,
    context: StepContext,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns values and weights of which each replica adds its part."""
    is_unknown = trial.shown(values, context).role is Role.OPAQUE
    if is_unknown and not unread_code.has_told(values, context):
        unread_code.warn_of_unknown_values(
            context, f"metric {name}", f"what the metric {name!r} is given"
        )
        context.unclear_losses.append(values)
    if _are_own(values, context) and _are_own(weight, context):
        return values, weight
    of_weight = None if weight is None else context.kinds.of(weight).role
    counts = (None, Role.EQUAL, Role.COUNT)
    if not _is_mean(values, context) or of_weight not in counts:
        try:
            return _everywhere(values, weight, context)
        except CannotTell:
            if values.shape.rank != 0:
                return values, weight
    if of_weight in (None, Role.EQUAL):
        weight = _part(weight, values, context)
    return values, weight


def _are_own(rows: tf.Tensor | None, context: StepContext) -> bool:
    """Whether each entry is, as far as one knows, that of one sample."""
    if rows is None:
        return True
    kind = context.kinds.of(rows)
    if kind.role is Role.ROWS:
        return not kind.is_entangled
    return kind.role is Role.OPAQUE and rows.shape.rank != 0


def _is_mean(values: tf.Tensor, context: StepContext) -> bool:
    """Whether one device has the mean of the replicas' values."""
    role = context.kinds.of(values).role
    means: tuple[Role, ...] = (Role.EQUAL, Role.MEAN, Role.OPAQUE)
    if context.part(UserReductions):  # the user exchanges what is compared
        means = (*means, Role.DERIVED)
    return values.shape.rank == 0 and role in means


def _everywhere(
    values: tf.Tensor, weight: tf.Tensor | None, context: StepContext
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns those of one device, whose weights are shared out."""
    if weight is None:
        (found,) = global_values([values], context)
        return found, _part(None, found, context)
    # Keras multiplies a mask into weights, where there are any.
    mask = keras_models.mask_of(values)
    given = [values, weight] if mask is None else [values, weight, mask]
    found, weight, *masks = global_values(given, context)
    if masks:
        keras_models.set_mask(found, masks[0])
    return found, _part(weight, found, context)


def _part(
    weight: tf.Tensor | None, values: tf.Tensor, context: StepContext
) -> tf.Tensor:
    """Returns the replica's part of the weights, which are 1 by default."""
    fraction = context.batch_fraction
    if weight is not None:
        return tf.cast(weight, fraction.dtype) * fraction
    return tf.fill(tf.shape(values)[:1], fraction)
