"""State that Keras and TensorFlow keep out of sight, of seeds and callbacks."""

from typing import Any

import keras
from keras.src.backend.common import global_state
from tensorflow.python.eager import context


def present_global_seed() -> keras.Variable | None:
    """Returns the seed behind `keras.random`, if this thread has used it."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


def eager_seed_state() -> Any:
    """Returns where the generator stands that seeds eager random operations.

    `None` if TensorFlow was given no seed.
    """
    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def set_eager_seed_state(saved: Any) -> None:
    """Puts that generator where it stood, if TensorFlow was given a seed."""
    generator = getattr(context.context(), "_rng", None)
    if saved is not None and generator is not None:
        generator.setstate(saved)


def set_monitor(callback: Any) -> None:
    """Makes a callback choose its comparison, as at its first epoch's end."""
    callback._set_monitor_op()


def flush_callbacks(callbacks: keras.callbacks.CallbackList) -> None:
    """Waits for callbacks that work in other threads."""
    for future in callbacks._futures:
        future.result()
