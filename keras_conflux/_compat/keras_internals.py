"""Keras' state of each thread, and its seeds."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import random
from keras.src.random import seed_generator


def with_this_threads_state(fn: Callable) -> Callable:
    """Makes `fn` see this thread's Keras settings in the thread it runs in."""
    # Keras keeps them by thread (backend/common/global_state.py), and each
    # replica has a thread. Both names are set for the whole program, not for
    # a scope.
    names = ("dtype_policy", "global_seed_generator")
    settings = {name: global_state.get_global_attribute(name) for name in names}

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        return fn(*args, **kwargs)

    return run


def drawn_seed(seed: Any) -> tf.Tensor:
    """Returns the seed that Keras gives to TensorFlow: two int32.

    Args:
        seed: An integer, a generator, which counts on, or `None`.
    """
    drawn: Any = seed_generator.draw_seed(seed)
    return random._cast_seed(drawn)
