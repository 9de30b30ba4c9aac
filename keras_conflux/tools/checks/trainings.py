"""What several checks train."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_conflux._extensions.memory.model_memory import Memory
from keras_conflux._extensions.memory.model_memory import memory
from keras_conflux._replication.replication import replicate
from keras_conflux._replication.synchronization import assert_in_sync

_SAMPLES = 59
_BATCH = 16


def trained(
    devices: Any, jit_compile: bool, callbacks: Sequence[Any] = ()
) -> list[np.ndarray]:
    """Trains a small model on uneven batches.

    Args:
        devices: Where; `None` for one device, without replicas.
        jit_compile: Whether XLA compiles its steps.
        callbacks: Those of `fit`.

    Returns:
        All that it has learned.
    """
    model = _model(devices, jit_compile)
    fit = {"batch_size": _BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(*_data(), callbacks=[*callbacks], **fit)
    losses = history.history["loss"]
    if devices is not None:
        assert_in_sync(model)
    return [np.array(losses), *model.get_weights()]


def memory_of(devices: Any) -> Memory:
    """Returns what the training on some devices needs, as XLA compiles it.

    Args:
        devices: Where it runs.
    """
    batch = [array[:_BATCH] for array in _data()]
    return memory(_model(devices, jit_compile=True), tuple(batch))


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


class Kill(keras.callbacks.Callback):
    """Ends this process in the second epoch, as if it were out of memory.

    Args:
        folder: Where its checkpoints are; `None` to let it live.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch.

        Args:
            epoch: Its number, from 0.
            logs: Not used.
        """
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Ends the process.

        Args:
            batch: The number of the step, from 0.
            logs: Not used.
        """
        if self._folder and (self._epoch, batch) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing that belongs to the training."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes nothing.

        Args:
            state: Not used.
        """


def largest_difference(
    found: list[np.ndarray], expected: list[np.ndarray]
) -> float:
    """Returns the largest difference, relative to each array's largest."""
    return max(
        float(np.abs(one - two).max() / max(np.abs(two).max(), 1e-3))
        for one, two in zip(found, expected, strict=True)
    )
