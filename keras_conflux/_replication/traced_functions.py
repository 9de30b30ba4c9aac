"""Drops what was traced over TensorFlow variables that have been exchanged."""

import weakref
from typing import Any

import keras

_exchanges = 0
_seen: Any = weakref.WeakKeyDictionary()
"""By model, how many exchanges there were when its functions were made."""


def note_exchange() -> None:
    """Records that a Keras variable got another TensorFlow variable."""
    global _exchanges
    _exchanges += 1


def forget_stale(model: keras.Model) -> None:
    """Drops a model's functions if variables were exchanged since.

    A model that shares layers with a replicated one is concerned, too.
    """
    if _seen.get(model, 0) != _exchanges:
        _seen[model] = _exchanges
        forget(model)


def forget(model: Any) -> None:
    """Drops a model's functions, which are made again when it next runs."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None
