"""Drops what was traced over TensorFlow variables that have been exchanged.

A step may use variables that are not its model's own: layers that it shares, a
teacher in its loss. So any exchange makes all functions stale. A function is
dropped only where it is about to be made, never while a loop calls it.
"""

import weakref
from typing import Any

_exchanges = 0
_made: Any = weakref.WeakKeyDictionary()
"""By model and name, the number of exchanges when a function was made."""


def note_exchange() -> None:
    """Records that a Keras variable got another TensorFlow variable."""
    global _exchanges
    _exchanges += 1


def forget_if_stale(model: Any, name: str) -> None:
    """Drops a function if variables were exchanged since it was made.

    To be called where the function is about to be made or reused.

    Args:
        model: Whose function.
        name: `"train_function"`, `"test_function"` or `"predict_function"`.
    """
    made = _made.setdefault(model, {})
    if made.get(name, 0) != _exchanges:
        made[name] = _exchanges
        setattr(model, name, None)


def forget(model: Any) -> None:
    """Drops a model's functions, which are made again when it next runs."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None
