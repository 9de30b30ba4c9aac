"""What Keras keeps private of callbacks that go on."""

from typing import Any

import keras


def set_monitor(callback: Any) -> None:
    """Makes a callback decide what is better, as at its first epoch's end."""
    callback._set_monitor_op()


def flush_tensorboard(callback: keras.callbacks.TensorBoard) -> None:
    """Sees to it that what a TensorBoard callback has written is in files."""
    for writer in callback._writers.values():
        writer.flush()


def flush_callbacks(callbacks: keras.callbacks.CallbackList) -> None:
    """Waits for what callbacks do in other threads."""
    callbacks._flush_futures()
