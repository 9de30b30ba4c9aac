"""The state of data besides the place in it: of a `PyDataset`, of validation.

Each evaluation draws from the beginning. So it is enough to know which
iterators have been made, and the state of a `PyDataset`.
"""

import types
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


def held_by(owner: Any) -> HeldAttributes:
    """Returns the attributes of a `PyDataset`; `None` has none."""
    if owner is None:
        owner = types.SimpleNamespace()
    return HeldAttributes(owner, _plain_of, _mark)


def _plain_of(owner: Any) -> dict[str, Any]:
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


class ValidationData:
    """Takes and gives back the state of a `fit`'s validation data."""

    def __init__(self, given: Any, steps: int | None) -> None:
        source = keras.utils.unpack_x_y_sample_weight(given)[0]
        is_dataset = isinstance(source, tf.data.Dataset)
        is_py_dataset = isinstance(source, keras.utils.PyDataset)
        self.source = source
        self.steps = steps
        self.dataset = source if is_dataset else None
        self.owner = source if is_py_dataset else None
        self._held = held_by(self.owner)

    @property
    def iterators(self) -> int:
        """How many iterators have been made of a `tf.data.Dataset`."""
        return len(iterator_history.drawn_iterators(self.dataset))

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` takes."""
        return {
            "made": iterator_history.drawn_iterators(self.dataset),
            "attributes": self._held.changed(),
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
