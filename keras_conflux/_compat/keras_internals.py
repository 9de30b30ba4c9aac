"""How Keras distributes, and what it keeps for each thread."""

import functools
from collections.abc import Callable
from typing import Any

from keras.src.backend.common import global_state


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
