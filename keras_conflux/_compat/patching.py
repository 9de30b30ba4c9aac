"""Gives methods of Keras a second behaviour.

Keras has no plug-in point for the behaviour of replicas. `patch` adds one: a
method behaves differently for replicated objects, and as before for all
others. The replacements are put in place when the package is first used.
"""

import functools
import os
import pathlib
import threading
import types
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
from keras.src.utils import traceback_utils

from keras_conflux._compat.private_names import ListedName
from keras_conflux._compat.private_names import version_numbers


@functools.cache
def _code_of_filter() -> types.CodeType:
    """Returns the code that hides frames of Keras, and now ours, too."""
    ours = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
    traceback_utils._EXCLUDED_PATHS += (ours,)
    return traceback_utils.filter_traceback(print).__code__


def patch(point: ListedName, replacement: Callable[..., Any]) -> None:
    """Puts `replacement(original, *args, **kwargs)` in place of a method.

    The original of a property is the function that reads it.
    """
    owner = point.owner
    found = getattr(owner, point.attribute)
    original = getattr(found, "fget", found)

    @functools.wraps(original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    new = property(dispatcher) if isinstance(found, property) else dispatcher
    if getattr(original, "__code__", None) is _code_of_filter():
        new = traceback_utils.filter_traceback(dispatcher)
    setattr(owner, point.attribute, new)


def patch_all(table: Iterable[tuple[ListedName, Callable[..., Any]]]) -> None:
    """Patches each point of a table that this version of Keras has."""
    version = version_numbers(keras.__version__)
    for point, replacement in table:
        if point.is_in(version):
            patch(point, replacement)


def look_up_late(point: ListedName) -> None:
    """Has a method that was looked up before the first use act as after it.

    Python looks up `fit` first in `model.fit(x, callbacks=[kc.Resume("a")])`.
    """
    owner, name = point.owner, point.attribute
    original = getattr(owner, name)

    @functools.wraps(original)
    def door(*args: Any, **kwargs: Any) -> Any:
        now = getattr(owner, name)
        return (original if now is door else now)(*args, **kwargs)

    setattr(owner, name, door)
    when_used(functools.partial(setattr, owner, name, original))


_lock = threading.RLock()
_waiting: list[Callable[[], None]] = []
when_used = _waiting.append
"""Has a function called once, before the package first does something."""


def begin() -> None:
    """Calls what waits. Whoever relies on replacements calls this first."""
    while _waiting:
        with _lock:  # other threads go on when all is called
            if _waiting:
                _waiting[0]()
                del _waiting[0]
