"""Callbacks that add to the logs of an epoch, and what they learn of `fit`.

Keras hands one dictionary of logs to all callbacks in turn. What one of them
adds is seen by those that come later: by `CSVLogger`, `History`, the progress
bar.
"""

import keras

from keras_conflux._compat import keras_models
from keras_conflux._fit.input.execution_plan import current_plan
from keras_conflux._fit.input.measurements import Measurements
from keras_conflux._replication.strategy import ReplicatedStrategy


class LogSource(keras.callbacks.Callback):
    """A callback that adds to the logs, and that `fit` calls before others.

    Where several processes train together, all have it, or none.
    """


def first(callbacks: list) -> list:
    """Returns callbacks with those in front that add to the logs."""
    return sorted(callbacks, key=lambda each: not isinstance(each, LogSource))


def described(callbacks: list) -> str:
    """Returns how messages say which callbacks add to the logs."""
    sources = [each for each in callbacks if isinstance(each, LogSource)]
    return "".join(f" with {type(each).__name__}" for each in sources)


def measured(
    model: keras.Model,
) -> tuple[Measurements, ReplicatedStrategy] | None:
    """Returns what is measured of the running `fit`, and what replicates it.

    Args:
        model: What it trains.

    Returns:
        `None` if Keras' own loop runs the steps, without replicas.
    """
    plan = current_plan()
    if plan is None or plan.strategy is not keras_models.strategy_of(model):
        return None
    return plan.measurements, plan.strategy
