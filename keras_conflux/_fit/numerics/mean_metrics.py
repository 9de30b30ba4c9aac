"""Weights the means that a step gives to metrics by the replica's samples."""

from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._replication import step_context


def update_mean(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Counts a mean over this replica's samples by its fraction of the batch.

    Then the replicas' updates together are the one update that a single device
    makes with the mean over the whole batch.
    """
    context = step_context.current_fit_step()
    if context is not None:
        values = keras.ops.convert_to_tensor(values)
        if len(values.shape) == 0 and sample_weight is None:
            sample_weight = context.batch_fraction
    return original(metric, values, sample_weight)
