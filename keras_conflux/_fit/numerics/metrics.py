"""Gives metrics what one device would give them.

Those that take a mean get numbers that are weighted by the samples behind them.
Those that count get the whole batch where a step has mixed samples.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._custom_loops.collectives import UserReductions
from keras_conflux._fit.global_batch import trial
from keras_conflux._fit.global_batch.derivation import NotDerivable
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics import warnings
from keras_conflux._fit.numerics.returns import Logs
from keras_conflux._fit.numerics.warnings import UnclearLosses
from keras_conflux._replication import steps
from keras_conflux._replication.steps import Step
from keras_conflux._replication.strategy import replica_collectives


def update_mean(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Makes the replicas' updates add up to the one that a device makes.

    What has no samples any more, such as the mean of a loss, counts by the
    replica's fraction of the batch, and so does what compares samples: each
    replica then has the values of one device.
    """
    step = steps.current_fit_step()
    if step is None:
        return original(metric, values, sample_weight)
    Logs.of(step).note_metric(metric)
    values = keras_variables.as_tensor(values)
    if sample_weight is not None:
        sample_weight = keras_variables.as_tensor(sample_weight)
    values, sample_weight = _shares(metric.name, values, sample_weight, step)
    return original(metric, values, sample_weight)


def _shares(
    name: str,
    values: tf.Tensor,
    weight: tf.Tensor | None,
    step: Step,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns values and weights of which each replica adds its part."""
    unclear = UnclearLosses.of(step)
    is_unknown = trial.shown(values, step).role is Role.OPAQUE
    if is_unknown and not unclear.lead_to(values):
        warnings.warn_of_unknown_values(
            step, f"metric {name}", f"what the metric {name!r} is given"
        )
        unclear.add(values)
    if _are_own(values, step) and _are_own(weight, step):
        return values, weight
    of_weight = None if weight is None else step.kinds.of(weight).role
    counts = (None, Role.EQUAL, Role.COUNT)
    if not _is_mean(values, step) or of_weight not in counts:
        try:
            return _everywhere(values, weight, step)
        except NotDerivable:
            if values.shape.rank != 0:
                return values, weight
    if of_weight in (None, Role.EQUAL):
        weight = _share_of_weight(weight, values, step)
    return values, weight


def _are_own(rows: tf.Tensor | None, step: Step) -> bool:
    """Whether each entry is, as far as one knows, that of one sample."""
    if rows is None:
        return True
    kind = step.kinds.of(rows)
    if kind.role is Role.ROWS:
        return not kind.depends_on_other_samples
    return kind.role is Role.OPAQUE and rows.shape.rank != 0


def _is_mean(values: tf.Tensor, step: Step) -> bool:
    """Whether one device has the mean of the replicas' values."""
    role = step.kinds.of(values).role
    means: tuple[Role, ...] = (Role.EQUAL, Role.MEAN, Role.OPAQUE)
    if UserReductions.of(step):  # the user exchanges what is compared
        means = (*means, Role.DERIVED)
    return values.shape.rank == 0 and role in means


def _everywhere(
    values: tf.Tensor, weight: tf.Tensor | None, step: Step
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns those of one device, whose weights are shared out."""
    if weight is None:
        (found,) = global_values([values], step)
        return found, _share_of_weight(None, found, step)
    # Keras multiplies a mask into weights, where there are any.
    mask = keras_models.mask_of(values)
    given = [values, weight] if mask is None else [values, weight, mask]
    found, weight, *masks = global_values(given, step)
    if masks:
        keras_models.set_mask(found, masks[0])
    return found, _share_of_weight(weight, found, step)


def _share_of_weight(
    weight: tf.Tensor | None, values: tf.Tensor, step: Step
) -> tf.Tensor:
    """Returns the replica's part of the weights, which are 1 by default."""
    fraction = step.batch_fraction
    if weight is not None:
        return tf.cast(weight, fraction.dtype) * fraction
    return tf.fill(tf.shape(values)[:1], fraction)


def update_count(
    original: Callable, metric: Any, *args: Any, **kwargs: Any
) -> Any:
    """Updates a metric by what one device has, if rows are not its own.

    What replicas count of their own samples adds up. A row that depends on
    other samples is another one on a replica, so all of them then compute the
    rows of the whole batch, and the first one's counts are kept.
    """
    step = steps.current_fit_step()
    if (
        step is None
        or tf.executing_eagerly()
        or replica_collectives().count == 1
    ):
        return original(metric, *args, **kwargs)
    given = keras.tree.flatten((args, kwargs))
    if any(_is_mixed(each, step) for each in given):
        try:
            given = _whole(given, step)
        except NotDerivable:
            _warn_of_rows(metric, step)
        args, kwargs = keras.tree.pack_sequence_as((args, kwargs), given)
    return original(metric, *args, **kwargs)


def _is_mixed(value: Any, step: Step) -> bool:
    if not isinstance(value, tf.Tensor) or value.shape.rank == 0:
        return False
    kind = step.kinds.of(value)
    return kind.depends_on_other_samples or kind.role is Role.DERIVED


def _whole(given: list[Any], step: Step) -> list[Any]:
    """Returns what one device would give to a metric."""
    masks = [
        keras_models.mask_of(each) if isinstance(each, tf.Tensor) else None
        for each in given
    ]
    differ = [
        each
        for each in (*given, *masks)
        if isinstance(each, tf.Tensor)
        and each.shape.rank != 0
        and step.kinds.of(each) != EQUAL
    ]
    found = {
        id(each): tf.ensure_shape(value, [None, *each.shape[1:]])
        for each, value in zip(differ, global_values(differ, step), strict=True)
    }
    for each, mask in zip(given, masks, strict=True):
        if mask is not None and id(each) in found:
            keras_models.set_mask(found[id(each)], found.get(id(mask), mask))
    return [found.get(id(each), each) for each in given]


def _warn_of_rows(metric: Any, step: Step) -> None:
    step.warn_once(
        f"metric {metric.name}",
        f"the metric {metric.name!r} gets rows that depend on other samples of "
        "the batch, in a way that replicas cannot reproduce for the whole "
        "batch, so each counts those of its own part. Give it what all "
        "replicas have, with `keras_conflux.allgather`, or rows of single "
        "samples.",
    )
