"""Drops what was traced over TensorFlow variables that have been exchanged.

A model that shares layers with a replicated one is concerned, too. A function
is dropped only where it is about to be made, never while a loop calls it.
"""

import weakref
from typing import Any

import keras

from keras_conflux._compat import keras_internals
from keras_conflux._replication import state

_latest = 0
"""The number of exchanges so far."""
_exchanged: dict[int, int] = {}
"""By the id of a Keras variable, the number of its last exchange."""
_made: Any = weakref.WeakKeyDictionary()
"""By model and name, the number of exchanges when a function was made, and the
id of the generator behind `keras.random` then."""


def note_exchange(variable: keras.Variable) -> None:
    """Records that a Keras variable got another TensorFlow variable."""
    global _latest
    _latest += 1
    if id(variable) not in _exchanged:
        weakref.finalize(variable, _exchanged.pop, id(variable), None)
    _exchanged[id(variable)] = _latest


def forget_if_stale(model: Any, name: str) -> None:
    """Drops a function if a variable of its model was exchanged since.

    To be called where the function is about to be made or reused.

    Args:
        model: Whose function.
        name: `"train_function"`, `"test_function"` or `"predict_function"`.
    """
    # A generator that `set_random_seed` has made since is none of a function
    # that was traced before, on one device neither.
    seeds = keras_internals.existing_seed_generator()
    made = _made.setdefault(model, {})
    since, former_seeds = made.get(name, (0, None))
    made[name] = _latest, id(seeds)
    if since == _latest or getattr(model, name) is None:
        return
    used = [model, seeds] if seeds and former_seeds == id(seeds) else [model]
    for variable in state.variables_of(used):
        if _exchanged.get(id(variable), 0) > since:
            setattr(model, name, None)
            return


def forget(model: Any) -> None:
    """Drops a model's functions, which are made again when it next runs."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None
