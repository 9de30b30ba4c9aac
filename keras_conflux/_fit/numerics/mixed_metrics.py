"""Gives metrics that count the whole batch where a step has mixed samples."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_collectives


def update(original: Callable, metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Updates a metric by what one device has, if rows are not its own.

    What replicas count of their own samples adds up. A row that depends on
    other samples is another one on a replica, so all of them then compute the
    rows of the whole batch, and the first one's counts are kept.
    """
    context = step_context.current_fit_step()
    if (
        context is None
        or tf.executing_eagerly()
        or replica_collectives().count == 1
    ):
        return original(metric, *args, **kwargs)
    given = keras.tree.flatten((args, kwargs))
    if any(_is_mixed(each, context) for each in given):
        try:
            given = _of_device(given, context)
        except CannotTell:
            _warn(metric, context)
        args, kwargs = keras.tree.pack_sequence_as((args, kwargs), given)
    return original(metric, *args, **kwargs)


def _is_mixed(value: Any, context: StepContext) -> bool:
    if not isinstance(value, tf.Tensor) or value.shape.rank == 0:
        return False
    kind = context.kinds.of(value)
    return kind.is_entangled or kind.role is Role.DERIVED


def _of_device(given: list[Any], context: StepContext) -> list[Any]:
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
        and context.kinds.of(each) != EQUAL
    ]
    found = {
        id(each): tf.ensure_shape(value, [None, *each.shape[1:]])
        for each, value in zip(
            differ, global_values(differ, context), strict=True
        )
    }
    for each, mask in zip(given, masks, strict=True):
        if mask is not None and id(each) in found:
            keras_models.set_mask(found[id(each)], found.get(id(mask), mask))
    return [found.get(id(each), each) for each in given]


def _warn(metric: Any, context: StepContext) -> None:
    context.warn_once(
        f"metric {metric.name}",
        f"the metric {metric.name!r} gets rows that depend on other samples of "
        "the batch, in a way that replicas cannot reproduce for the whole "
        "batch, so each counts those of its own part. Give it what all "
        "replicas have, with `keras_conflux.allgather`, or rows of single "
        "samples.",
    )
