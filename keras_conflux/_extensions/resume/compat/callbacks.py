"""The private parts of callbacks of Keras that go on."""

from typing import Any

import keras


def set_monitor(callback: Any) -> None:
    """Makes a callback choose its comparison, as at its first epoch's end."""
    callback._set_monitor_op()


def flush_callbacks(callbacks: keras.callbacks.CallbackList) -> None:
    """Waits for callbacks that work in other threads."""
    for future in callbacks._futures:
        future.result()
