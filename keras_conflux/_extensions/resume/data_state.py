"""The state of data besides the place in it: of a `PyDataset`, of validation.

Each evaluation draws from the beginning. So it is enough to know which
iterators have been made, and the state of a `PyDataset`.
"""

import copy
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._extensions.resume import iterator_history
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._extensions.resume.held_attributes import HeldAttributes

_LARGE = 8 * 2**20
"""Arrays of more bytes, mostly samples, are compared in a part."""
_ENTRIES = 2**21
"""How many entries of such an array tell whether it has changed."""
_STATE = "state_dict()"  # no attribute has such a name


class PyDatasetState:
    """Takes and gives back the state of a `PyDataset`.

    Args:
        owner: The `PyDataset`, as the script has made it; `None` for other
            data, which hold nothing.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        if owner is not None:
            self._held = HeldAttributes(owner, _plain_of, _mark)

    def taken(self) -> dict[str, Any] | None:
        """Returns copies of its changed attributes, or its own state."""
        owner = self._owner
        if owner is None:
            return None
        told = _tells_its_state(owner)
        return copy.deepcopy(
            {_STATE: plain_values.told_state(owner)}
            if told
            else self._held.changed()
        )

    def restore(self, attributes: dict[str, Any] | None) -> None:
        """Gives back the result of `taken`."""
        owner = self._owner
        if owner is None or attributes is None:
            return
        if _tells_its_state(owner) != (_STATE in attributes):
            raise ValueError(
                f"`{type(owner).__name__}` has got or lost the methods "
                "`state_dict` and `load_state_dict` since the checkpoint was "
                "saved. Give the training the data that it had, or begin "
                "another one in another directory."
            )
        attributes = copy.deepcopy(attributes)
        if _STATE in attributes:
            owner.load_state_dict(attributes[_STATE])
        else:
            self._held.restore(attributes)


def _plain_of(owner: Any) -> dict[str, Any]:
    if _tells_its_state(owner):
        return {}
    return {k: v for k, v in vars(owner).items() if plain_values.is_plain(v)}


def _mark(value: Any) -> Any:
    """Returns a mark that shows, within a process, that a value changes."""
    if getattr(value, "nbytes", 0) <= _LARGE or not isinstance(
        value, np.ndarray
    ):
        return plain_values.digest(value)
    seen = value.shape, value.dtype.str
    if isinstance(value, np.memmap) or not value.flags.writeable:
        return *seen, id(value)
    entries = value.flat[:: max(1, value.size // _ENTRIES)]
    return *seen, zlib.crc32(entries.tobytes())


def _tells_its_state(owner: Any) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


class ValidationData:
    """Takes and gives back the state of a `fit`'s validation data.

    Args:
        given: The argument `validation_data`.
        steps: The argument `validation_steps`.
    """

    def __init__(self, given: Any, steps: int | None) -> None:
        source = keras.utils.unpack_x_y_sample_weight(given)[0]
        is_dataset = isinstance(source, tf.data.Dataset)
        is_py_dataset = isinstance(source, keras.utils.PyDataset)
        self.source = source
        self.steps = steps
        self.dataset = source if is_dataset else None
        self.owner = source if is_py_dataset else None
        self._held = PyDatasetState(self.owner)

    @property
    def iterators(self) -> int:
        """How many iterators have been made of a `tf.data.Dataset`."""
        return len(iterator_history.drawn_iterators(self.dataset))

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` takes."""
        return {
            "made": iterator_history.drawn_iterators(self.dataset),
            "attributes": self._held.taken(),
            "variables": random_generators.variables(self.dataset),
        }

    def make_iterators(self, made: list[bool]) -> bool:
        """Makes iterators again; returns whether the data is where it was."""
        if self.dataset is None:
            return True
        return iterator_history.make_again(self.dataset, made)

    def restore(self, state: dict[str, Any]) -> None:
        """Gives a `PyDataset` its state, and variables their values."""
        random_generators.set_variables(self.dataset, state["variables"])
        self._held.restore(state["attributes"])
