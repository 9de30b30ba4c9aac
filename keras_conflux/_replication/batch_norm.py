"""Normalization by the samples of all replicas, or of each alone."""

import logging
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication import traced_functions

Layer = TypeVar("Layer", bound=keras.layers.Layer)

_log = logging.getLogger("keras_conflux")


def synchronize_batch_norm(target: Layer) -> Layer:
    """Makes a model normalize by the global batch, as on one device.

    By default each replica of a `BatchNormalization` normalizes by its own
    samples. This sets `synchronized` of each such layer, wherever in the model
    it is. A replicated model then computes what one device computes. The model
    may be replicated already, or be later; its weights stay as they are. The
    steps of `fit`, `evaluate` and `predict` of replicated models are traced
    again. A `withdevices` step keeps its traces, so call this before.

    PyTorch has `SyncBatchNorm.convert_sync_batchnorm`, which makes new layers.
    Here the layers stay the same objects.

    Args:
        target: A Keras model or layer.

    Returns:
        The target itself.

    Raises:
        TypeError: If the target is not a Keras model or layer.

    Example:
        ```python
        model = keras.applications.MobileNetV3Small(
            input_shape=(32, 32, 3), weights=None, classes=10
        )
        kc.replicate(kc.synchronize_batch_norm(model))
        ```
    """
    given: Any = target
    if not isinstance(given, keras.layers.Layer):
        raise TypeError(
            "`synchronize_batch_norm` takes a Keras model or layer. Received: "
            f"{target!r}."
        )
    for layer in unsynchronized(target):
        layer.synchronized = True
        traced_functions.note_settings()
    return target


def log_if_unsynchronized(layer: Any, training: Any = None, **_: Any) -> None:
    """Logs, once, that layers normalize parts of a batch apart, unless frozen.

    They are those of the model that `fit` trains, or a loop's first layer.
    """
    step = steps.current()
    is_apart = training and layer.trainable and not layer.synchronized
    if step is None or not is_apart or "batch norm" in step.warned:
        return
    step.warned.add("batch norm")
    count = (step.turns or tf.distribute.get_strategy().communicator).size
    if count == 1:
        return
    apart = unsynchronized([step.model, layer])
    names = [each.name for each in apart if each.trainable]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    _log.warning(
        "%s%s: each of %d parts of a batch is normalized by its own samples, "
        "which differs from one device. To normalize by all samples, call "
        "`keras_conflux.synchronize_batch_norm(model)`.",
        ", ".join(names[:3]),
        more,
        count,
    )


def unsynchronized(target: Any) -> list[keras.layers.BatchNormalization]:
    """Returns the layers that normalize by the samples of a part of a batch."""
    found = state.stateful_objects(target, keras.layers.BatchNormalization)
    return [each for each in found if not each.synchronized]
