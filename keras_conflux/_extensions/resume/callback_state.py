"""What callbacks hold, and how it is given back."""

import collections
import copy
from typing import Any

from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import held_objects
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.compat import (
    callbacks as private_callbacks,
)
from keras_conflux._extensions.resume.stored_arrays import Arrays

_SET_ANEW = {"params", "min_delta"}
"""Attributes that Keras sets in each training, `min_delta` by its old value."""

_LARGE = 2**20
"""How many bytes a value may have, of which a copy is kept."""


class CallbackStates:
    """Tells which attributes of callbacks have changed while they trained.

    What a script says, such as a `patience`, is obeyed as it is now.

    Args:
        callbacks: After their `on_train_begin`.
    """

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        for each in callbacks:
            if not _tells_its_state(each):
                held_objects.name_what_is_lost(each)
        self._before = [_Before(each) for each in callbacks]

    def changed(self, arrays: Arrays) -> list[list[Any]]:
        """Returns `[class, values, names]` for each callback.

        The names are those of values that are states of objects.

        Args:
            arrays: Gets copies of the arrays among the values.
        """
        found = []
        for callback, before in zip(self._callbacks, self._before, strict=True):
            values = before.changed()
            states = [each for each in _states_of(callback) if each in values]
            if hasattr(callback, "monitor_op"):
                values["monitor_op"] = callback.monitor_op is not None
            encoded = plain_values.encode(values, arrays)
            found.append([type(callback).__name__, encoded, states])
        return found

    def restore(self, saved: list[list[Any]], arrays: Arrays) -> None:
        """Gives the callbacks what they had."""
        _assert_same(self._callbacks, saved)
        for callback, before, (_, encoded, states) in zip(
            self._callbacks, self._before, saved, strict=True
        ):
            values = plain_values.decode(encoded, arrays)
            if values.pop("monitor_op", False) and callback.monitor_op is None:
                private_callbacks.set_monitor(callback)
            if _tells_its_state(callback):
                callback.load_state_dict(values)
            else:
                names = {*_states_of(callback), *states}
                _give(callback, before.of_others(values) | values, names)


class _Before:
    """What a callback held when its training began.

    Of large arrays it keeps digests only.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        held = _held_by(callback)
        self._digests = {k: plain_values.digest(v) for k, v in held.items()}
        self._values = {
            name: copy.deepcopy(value)
            for name, value in held.items()
            if plain_values.size(value) <= _LARGE
        }

    def changed(self) -> dict[str, Any]:
        """Returns what is another now, or all that the callback tells."""
        held = _held_by(self._callback)
        if _tells_its_state(self._callback):
            return held
        return {
            name: value
            for name, value in held.items()
            if plain_values.digest(value) != self._digests.get(name)
        }

    def of_others(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns what had not changed when others were saved, and has since.

        An `on_epoch_begin` sets it, and the epoch has begun once more.
        """
        found = {}
        for name in self.changed().keys() & self._digests.keys() - saved.keys():
            if name in self._values:
                found[name] = copy.deepcopy(self._values[name])
            else:
                owner = type(self._callback).__name__
                warn(
                    f"The attribute {name!r} of {owner} is too large to be put "
                    "back to what it was in the middle of the epoch. Give the "
                    "callback `state_dict` and `load_state_dict`."
                )
        return found


def _assert_same(callbacks: list[Any], saved: list[list[Any]]) -> None:
    """Raises `ValueError` if the callbacks are not those that were saved."""
    here = [type(each).__name__ for each in callbacks]
    there = [name for name, *_ in saved]
    if here != there:
        raise ValueError(
            f"The checkpoint was saved with the callbacks {there}, and the "
            f"call has {here}. What they hold belongs to the training: pass "
            "the same ones in the same order, or use another directory."
        )


def _tells_its_state(callback: Any) -> bool:
    return hasattr(callback, "state_dict")


def _held_by(callback: Any) -> dict[str, Any]:
    """Returns what can be saved of a callback. These are no copies."""
    if _tells_its_state(callback):
        return plain_values.told_state(callback)
    plain = {
        name: value
        for name, value in vars(callback).items()
        if name not in _SET_ANEW and plain_values.is_plain(value)
    }
    return plain | _states_of(callback)


def _states_of(callback: Any) -> dict[str, Any]:
    """Returns the states of objects that a callback holds."""
    if _tells_its_state(callback):
        return {}
    of_model = held_objects.variables_of(callback)
    found = {
        name: held_objects.state_of(value)
        for name, value in vars(callback).items()
        if id(value) not in of_model
    }
    return {name: state for name, state in found.items() if state is not None}


def _give(callback: Any, values: dict[str, Any], states: set[str]) -> None:
    """Sets attributes, and fills what others may hold, too.

    Args:
        callback: Who gets them.
        values: The values.
        states: The names of values that are states of objects.
    """
    held = vars(callback)
    for name in values.keys() & states:
        held_objects.set_state(held.get(name), values[name])
    plain = {k: v for k, v in values.items() if k not in states}
    for name, value in plain.items():
        _fill(held.get(name), value)
    for name, value in plain.items():
        # It was no container, or two names had the same one and no longer do.
        now = held.get(name)
        same = plain_values.is_plain(now) and plain_values.digest(now) == (
            plain_values.digest(value)
        )
        if name not in held or not same:
            held[name] = value


def _fill(container: Any, value: Any) -> None:
    """Gives a container the content of another one of its kind."""
    if type(container) is not type(value):
        return
    if isinstance(container, list | bytearray):
        container[:] = value
    elif isinstance(container, dict | set):
        container.clear()
        container.update(value)
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(value)
