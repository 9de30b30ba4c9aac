"""Marks the values given to metrics of a mean, where the graph does not."""

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
from keras_conflux._fit.numerics.warnings import UnclearLosses
from keras_conflux._replication import steps
from keras_conflux._replication.steps import Step
from keras_conflux._replication.steps import UserReductions


def update_mean(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Takes unknown values for rows of samples, or for a mean over them.

    Known values need nothing: the metric's variables get this replica's share
    of one device's summand.
    """
    step = steps.current_fit_step()
    if step is None:
        return original(metric, values, sample_weight)
    Logs.of(step).note_metric(metric)
    values = keras_variables.as_tensor(values)
    if kind_by_trial(values, step.kinds).role is Role.OPAQUE:
        _warn(metric, values, step)
        if values.shape.rank != 0:
            step.kinds.mark(values, rows(0))
    values = _taken_for(MEAN, values, step)
    if sample_weight is not None:
        weight = keras_variables.as_tensor(sample_weight)
        sample_weight = _taken_for(COUNT, weight, step)
    return original(metric, values, sample_weight)


def _warn(metric: Any, values: tf.Tensor, step: Step) -> None:
    unclear = UnclearLosses.of(step)
    if not unclear.lead_to(values):
        warnings.warn_of_unknown_values(
            step,
            f"metric {metric.name}",
            f"the input of the metric {metric.name!r}",
        )
        unclear.add(values)


def _taken_for(kind: Kind, value: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns a number of which the kind is known.

    Args:
        kind: The kind that it is taken for, if replicas cannot compute one
            device's value.
        value: A tensor. If it has axes, it is returned as it is.
        step: The step of the replica.
    """
    unclear = Role.DERIVED, Role.OPAQUE
    if value.shape.rank != 0 or step.kinds.of(value).role not in unclear:
        return value
    if not UserReductions.of(step):  # else the user exchanges values
        with contextlib.suppress(NotDerivable):
            derivation_of(value, step.kinds)
            return value
    value = tf.identity(value)  # a loss keeps its kind
    step.kinds.mark(value, kind)
    return value
