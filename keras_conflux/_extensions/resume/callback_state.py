"""The state of callbacks, and its restoration."""

from typing import Any

import keras

from keras_conflux._extensions.resume import held_objects
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.held_attributes import HeldAttributes
from keras_conflux._extensions.resume.stored_arrays import Arrays

_SET_ANEW = {"params", "min_delta"}
"""Attributes that Keras sets in each training, `min_delta` by its old value."""
_OF_LOGS = keras.callbacks.History | keras.callbacks.CSVLogger
"""Callbacks whose containers hold the names of logs, which may be any."""


class CallbackStates:
    """Tells which attributes of callbacks have changed while they trained.

    Args:
        callbacks: After their `on_train_begin`.
    """

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self._held = [_held_attributes(each) for each in callbacks]
        self._waits = True

    def begin_epoch(self) -> None:
        """Called after all callbacks' `on_epoch_begin`."""
        for held in filter(None, self._held if self._waits else ()):
            held.declare_what_is_there()
        self._waits = False

    def changed(self, arrays: Arrays) -> list[list[Any]]:
        """Returns `[class, values]` for each callback; arrays are beside."""
        found = []
        for callback, held in zip(self._callbacks, self._held, strict=True):
            if held is None:
                values = plain_values.told_state(callback)
            else:
                values = held.changed()
            encoded = plain_values.encode(values, arrays)
            found.append([type(callback).__name__, encoded])
        return found

    def restore(self, saved: list[list[Any]], arrays: Arrays) -> None:
        """Gives the callbacks their former values."""
        _assert_same(self._callbacks, saved)
        for callback, held, (_, encoded) in zip(
            self._callbacks, self._held, saved, strict=True
        ):
            values = plain_values.decode(encoded, arrays)
            if held is None:
                callback.load_state_dict(values)
            else:
                held.restore(values)


def _assert_same(callbacks: list[Any], saved: list[list[Any]]) -> None:
    """Raises `ValueError` if the callbacks are not those that were saved."""
    here = [type(each).__name__ for each in callbacks]
    there = [name for name, *_ in saved]
    if here != there:
        raise ValueError(
            f"The checkpoint was saved with the callbacks {there}, and the "
            f"call has {here}. Their state belongs to the training: pass "
            "the same ones in the same order, or use another directory."
        )


def _held_attributes(callback: Any) -> HeldAttributes | None:
    """Returns the attributes; `None` if the callback restores them itself."""
    if hasattr(callback, "state_dict"):
        plain_values.told_state(callback)  # which may not be saved
        return None
    held_objects.name_what_is_lost(callback)
    is_of_logs = isinstance(callback, _OF_LOGS)
    return HeldAttributes(callback, _held_by, any_words=is_of_logs)


def _held_by(callback: Any) -> dict[str, Any]:
    """Returns the savable values of a callback. These are no copies."""
    of_model = held_objects.variables_of(callback)
    found = {}
    for name, value in vars(callback).items():
        state = held_objects.state_of(value)
        if state is not None and id(value) not in of_model:
            found[name] = plain_values.State(state)
        elif name not in _SET_ANEW and plain_values.is_plain(value):
            found[name] = value
    return found
