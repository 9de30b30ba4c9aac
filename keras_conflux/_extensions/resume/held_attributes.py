"""The attributes of callbacks and data, of which a checkpoint gives some back.

A value that has changed in training is saved. A checkpoint may be a stranger's:
it gives a value to an attribute that is there, of the kind that it has, and no
text that could be a path.
"""

import collections
import copy
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import plain_values

CONTAINERS = (list, dict, set, bytearray, collections.deque)
"""The plain values that may be changed in place."""
_OF_LOGS = keras.callbacks.History | keras.callbacks.CSVLogger
"""Callbacks whose containers hold the names of logs, which may be any."""
_TOLD = "state_dict()"  # no attribute has such a name


class HeldAttributes:
    """Attributes of an object at the begin, or what it tells, and changes."""

    def __init__(
        self,
        owner: Any,
        read: Callable[[Any], dict[str, Any]],
        digest: Callable[[Any], Any] = plain_values.digest,
    ) -> None:
        self._owner, self._read, self._digest = owner, read, digest
        self._any_words = isinstance(owner, _OF_LOGS)
        self._tells = tells_its_state(owner)
        if self._tells:
            plain_values.told_state(owner)  # which may not be saved
        held = self._now()
        self._digests = {name: digest(value) for name, value in held.items()}
        self._forms = _forms(_of_classes(owner) | held)
        self._changed: set[str] = set()
        """Those that were not as at the begin at some time."""
        self._named: set[str] = set()
        self._is_new = True

    def begin_epoch(self) -> None:
        """Notes changes of an `on_epoch_begin`; the first one may declare."""
        now = self._now()
        self._note_changes(now)
        if self._is_new:
            self._forms = _forms(now) | self._forms
        self._is_new = False

    def changed(self) -> dict[str, Any]:
        """Returns copies of the values that can be given back, and changed."""
        if self._tells:
            return {_TOLD: copy.deepcopy(plain_values.told_state(self._owner))}
        now = self._now()
        self._note_changes(now)
        found = {k: v for k, v in now.items() if k in self._changed}
        lost = {k for k, v in found.items() if not self._may_get(k, v)}
        new = lost - self._named
        if new and not is_of_keras(self._owner):
            self._named |= new
            warn(
                f"{type(self._owner).__name__} has changed in training, and "
                f"cannot be given back {sorted(new)} if it is interrupted. A "
                "checkpoint, which may be of others, makes no attributes, "
                "changes no types, and sets no texts but those that were held "
                "when training began. Set them in `__init__` to values of "
                "their types, or write `state_dict()` and "
                "`load_state_dict(state)`."
            )
        return copy.deepcopy({k: v for k, v in found.items() if k not in lost})

    def restore(self, saved: dict[str, Any]) -> None:
        """Gives the object the values of `changed`.

        None may be of another type, or hold a path.
        """
        if self._tells != (_TOLD in saved):
            raise ValueError(
                f"`{type(self._owner).__name__}` has got or lost the methods "
                "`state_dict` and `load_state_dict` since the checkpoint was "
                "saved. Train with the program that was saved, or use another "
                "directory."
            )
        saved = copy.deepcopy(saved)
        if self._tells:
            self._owner.load_state_dict(saved[_TOLD])
            return
        saved = {k: v for k, v in saved.items() if k in self._forms}
        wrong = [k for k, v in saved.items() if not self._may_get(k, v)]
        if wrong:
            raise ValueError(
                f"The checkpoint has values for {wrong} of "
                f"{type(self._owner).__name__} of types that it does not have "
                "here, or texts that it does not hold, which could "
                "be paths. Train with the program that was saved, or use "
                "another directory."
            )
        self._changed |= saved.keys()
        _give(self._owner, saved)

    def _may_get(self, name: str, value: Any) -> bool:
        form = self._forms.get(name)
        return form is not None and form.admits(value, self._any_words)

    def _now(self) -> dict[str, Any]:
        return {} if self._tells else self._read(self._owner)

    def _note_changes(self, now: dict[str, Any]) -> None:
        self._changed |= {
            name
            for name, value in now.items()
            if self._digest(value) != self._digests.get(name)
        }


def tells_its_state(owner: Any) -> bool:
    """Whether an object saves and restores itself."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def _forms(values: dict[str, Any]) -> dict[str, plain_values.Form]:
    return {k: plain_values.Form(v) for k, v in values.items()}


def _of_classes(owner: Any) -> dict[str, Any]:
    """Returns the attributes that an object has of its classes."""
    return {
        name: value
        for each in reversed(type(owner).__mro__)
        for name, value in vars(each).items()
        if not name.startswith("__") and plain_values.is_plain(value)
    }


def _give(owner: Any, values: dict[str, Any]) -> None:
    """Sets attributes, and fills objects that others may hold, too."""
    held = vars(owner)
    plain = {}
    for name, value in values.items():
        if isinstance(value, plain_values.State):
            set_state(held.get(name), value.value)
        else:
            _fill(held.get(name), value)
            plain[name] = value
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
    if type(container) is type(value) and isinstance(container, CONTAINERS):
        container.clear()
        if isinstance(container, dict | set):
            container.update(value)
        else:
            container.extend(value)


def state_of(value: Any) -> Any:
    """Returns the state of an object as a plain value, or `None`."""
    if isinstance(value, keras.Variable | tf.Variable):
        return value.numpy()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.getstate() if isinstance(value, random.Random) else None


def set_state(value: Any, state: Any) -> None:
    """Gives an object the state that it had. Others have none."""
    if isinstance(value, keras.Variable | tf.Variable):
        value.assign(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)


def is_of_keras(callback: Any) -> bool:
    """Whether Keras or this package has written the callback or its parent."""
    plain = (keras.callbacks.Callback, keras.callbacks.LambdaCallback)
    return any(
        each.__module__.startswith(("keras.", "keras_conflux."))
        for each in type(callback).__mro__
        if each not in plain
    )
