"""Drops what was traced over TensorFlow variables that have been exchanged.

A step may use variables that are not its model's own: layers that it shares, a
teacher in its loss. So any exchange makes all functions stale. A function is
dropped only where it is about to be made, never while a loop calls it.

The seed of `keras.random` is one for all models, so it goes to and fro between
those on different devices. A function is not stale where the seed lies again
as it lay when the function was made.
"""

import dataclasses
import weakref
from typing import Any

import keras

from keras_conflux._compat import keras_internals


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a function was made over."""

    exchanges: int = 0
    """How many there had been."""
    seed: keras.Variable | None = None
    """That of `keras.random`."""
    backing: Any = None
    """The TensorFlow variable that held it."""

    def is_stale(self) -> bool:
        moved = self.seed is not None and (
            keras_internals.backing(self.seed) is not self.backing
        )
        return moved or self.exchanges != _exchanges


_exchanges = 0
_made: Any = weakref.WeakKeyDictionary()
"""By model and name, what a function was made over."""


def note_exchange() -> None:
    """Records that a Keras variable got a new TensorFlow variable."""
    global _exchanges
    _exchanges += 1


def has_become_stale(model: Any, name: str) -> bool:
    """Whether variables were exchanged since a function was made.

    To be called where the function is about to be made or reused: it is not
    stale any more for the next call. The function stays where it is until the
    new one is there, as another thread may be using it.

    Args:
        model: Whose function.
        name: `"train_function"`, `"test_function"` or `"predict_function"`.
    """
    made = _made.setdefault(model, {})
    stale = made.get(name, _Made()).is_stale()
    if stale or name not in made:
        seed = keras_internals.present_global_seed()
        backing = None if seed is None else keras_internals.backing(seed)
        made[name] = _Made(_exchanges, seed, backing)
    return stale


def forget(model: Any) -> None:
    """Drops a model's functions, which are made again when it next runs."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None
