"""How Keras distributes, and what it keeps for each thread."""

import functools
from collections.abc import Callable
from typing import Any

from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import (
    distribution_lib as backend_distribution,
)


def provide_distribution(*functions: Callable[..., Any]) -> None:
    """Gives Keras what its TensorFlow backend lacks for `keras.distribution`.

    Args:
        *functions: Found by their names, which are those that other backends
            have.
    """
    # keras.src.distribution calls them on this module. In 3.14.0 and 3.15.1
    # it has `list_devices`, which works, and attempts at DTensor.
    for function in functions:
        setattr(backend_distribution, function.__name__, function)


def take_whole_datasets(distribution: Any) -> None:
    """Keeps a distribution of several processes from sharding data sets."""
    distribution._is_multi_process = False


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


def stateless_scope() -> Any:
    """Returns the `keras.StatelessScope` that this thread is in, or `None`."""
    return global_state.get_global_attribute("stateless_scope")
