"""The attributes of callbacks and data, of which a checkpoint gives some back.

A script's value, such as a `patience`, is obeyed as it is now. A value that has
changed in training is saved. A checkpoint may be a stranger's: it gives a value
to an attribute that is there, of the kind that it has, and no text that could
be a path.
"""

import collections
import copy
from collections.abc import Callable
from typing import Any

from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import held_objects
from keras_conflux._extensions.resume import plain_values

_LARGE = 2**20
"""How many bytes a value may have, of which a copy is kept."""


class HeldAttributes:
    """The attributes of an object at the begin, and their changes since.

    Of large arrays it keeps digests only.

    Args:
        owner: The object.
        read: Returns its attributes that can be saved, which are no copies.
        digest: Returns a digest by which a value is known again.
        any_words: Whether the texts in its containers are never paths.
    """

    def __init__(
        self,
        owner: Any,
        read: Callable[[Any], dict[str, Any]],
        digest: Callable[[Any], Any] = plain_values.digest,
        any_words: bool = False,
    ) -> None:
        self._owner, self._read, self._digest = owner, read, digest
        self._any_words = any_words
        held = read(owner)
        self._digests = {name: digest(value) for name, value in held.items()}
        self._values = {
            name: copy.deepcopy(value)
            for name, value in held.items()
            if plain_values.size(value) <= _LARGE
        }
        self._forms = _forms(_of_classes(owner) | held)
        self._named: set[str] = set()

    def declare_what_is_there(self) -> None:
        """Counts attributes of the first `on_epoch_begin` as declared, too."""
        self._forms = _forms(self._read(self._owner)) | self._forms

    def changed(self) -> dict[str, Any]:
        """Returns the values that have changed, and can be given back."""
        found = self._other_values()
        lost = {k for k, v in found.items() if not self._may_get(k, v)}
        new = lost - self._named
        if new and not held_objects.is_of_keras(self._owner):
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
        return {k: v for k, v in found.items() if k not in lost}

    def restore(self, saved: dict[str, Any]) -> None:
        """Gives the object the values of `changed`, and all else as it was.

        Values of attributes that are not there are not set.

        Raises:
            ValueError: If a value is of another type than is there, or may
                hold a path.
        """
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
        _give(self._owner, self._of_others(saved) | saved)

    def _may_get(self, name: str, value: Any) -> bool:
        form = self._forms.get(name)
        return form is not None and form.admits(value, self._any_words)

    def _other_values(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._read(self._owner).items()
            if self._digest(value) != self._digests.get(name)
        }

    def _of_others(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns values that have changed only since others were saved.

        An `on_epoch_begin` sets it, and the epoch has begun once more.
        """
        since = self._other_values().keys() & self._digests.keys()
        found = {}
        for name in since - saved.keys():
            if name in self._values:
                found[name] = copy.deepcopy(self._values[name])
            else:
                owner = type(self._owner).__name__
                warn(
                    f"The attribute {name!r} of {owner} is too large to be put "
                    "back to its value in the middle of the epoch. Give "
                    f"{owner} `state_dict` and `load_state_dict`."
                )
        return found


def _forms(values: dict[str, Any]) -> dict[str, plain_values.Form]:
    return {k: plain_values.Form.from_value(v) for k, v in values.items()}


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
            held_objects.set_state(held.get(name), value.value)
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
