"""The models and trainings of several checks."""

from typing import Any

import keras
import numpy as np

from keras_conflux._replication.replication import replicate
from keras_conflux._replication.synchronization import assert_in_sync

_SAMPLES = 59
_BATCH = 16


def trained(devices: Any, jit_compile: bool) -> list[np.ndarray]:
    """Trains a small model on uneven batches.

    Args:
        devices: The devices; `None` for one device, without replicas.
        jit_compile: Whether XLA compiles its steps.

    Returns:
        All that it has learned.
    """
    model = _model(devices, jit_compile)
    fit = {"batch_size": _BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(*_data(), **fit)
    losses = history.history["loss"]
    if devices is not None:
        assert_in_sync(model)
    return [np.array(losses), *model.get_weights()]


def _model(devices: Any, jit_compile: bool) -> Any:
    keras.utils.set_random_seed(1)
    model: Any = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "tanh"),
            keras.layers.BatchNormalization(synchronized=devices is not None),
            keras.layers.Dense(1),
        ]
    )
    # Adam and clipping would hide gradients that are too large everywhere.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    if devices is not None:
        replicate(model, devices)
    return model


def _data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(_SAMPLES, 8)).astype("float32")
    return x, x[:, :1] * 2 + np.sin(x[:, 1:2])


def largest_difference(
    found: list[np.ndarray], expected: list[np.ndarray]
) -> float:
    """Returns the largest difference, relative to each array's largest."""
    return max(
        float(np.abs(one - two).max() / max(np.abs(two).max(), 1e-3))
        for one, two in zip(found, expected, strict=True)
    )
