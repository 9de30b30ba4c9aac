"""The state of data besides the place in it: iterators made, and a `PyDataset`.

A shuffle of tf.data takes a seed for each iterator that is made of it, by
whomever. So the next elements follow from all that were made before.
"""

import types
import weakref
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.compat import pipelines
from keras_conflux._extensions.resume.compat import private_state
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._extensions.resume.held_attributes import HeldAttributes

_LARGE = 8 * 2**20
"""Arrays of more bytes, mostly samples, are compared in a part."""
_ENTRIES = 2**21
"""How many entries of such an array tell whether it has changed."""
_made: Any = weakref.WeakKeyDictionary()
"""By data set, how many iterators were made of it."""
_generators: Any = weakref.WeakSet()


def mark(value: Any) -> Any:
    """Returns a mark that shows, within a process, that a value changes."""
    if not isinstance(value, np.ndarray) or value.nbytes <= _LARGE:
        return plain_values.digest(value)
    seen = value.shape, value.dtype.str
    if isinstance(value, np.memmap) or not value.flags.writeable:
        return *seen, id(value)
    entries = value.flat[:: max(1, value.size // _ENTRIES)]
    return *seen, zlib.crc32(entries.tobytes())


class ValidationData:
    """Takes and gives back the state of a `fit`'s validation data."""

    def __init__(self, given: Any) -> None:
        source = keras.utils.unpack_x_y_sample_weight(given)[0]
        self.source = source
        self.dataset = source if isinstance(source, tf.data.Dataset) else None
        is_py_dataset = isinstance(source, keras.utils.PyDataset)
        self._held = HeldAttributes(source if is_py_dataset else None, mark)

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` takes."""
        return {
            "made": iterators_made(self.dataset),
            "attributes": self._held.changed(),
            "variables": random_generators.variables(self.dataset),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Gives a `PyDataset` its state, and variables their values."""
        random_generators.set_variables(self.dataset, state["variables"])
        self._held.restore(state["attributes"])


def used_before(source: Any) -> Any:
    """Returns a generator that a former call has drawn from, else `None`."""
    if not isinstance(source, types.GeneratorType):
        return None
    known = source in _generators
    _generators.add(source)
    return source if known else None


def track(iterator: Any) -> None:
    """Counts the iterators that an epoch iterator of Keras makes."""

    def note_iterator() -> None:
        dataset = private_state.dataset_of(iterator)
        _made[dataset] = iterators_made(dataset) + 1

    private_state.count_iterators(iterator, note_iterator)


def iterators_made(dataset: Any) -> int:
    """Returns how many iterators were made of a data set; none of `None`."""
    return 0 if dataset is None else _made.get(dataset, 0)


def make_again(dataset: Any, count: int) -> bool:
    """Makes the iterators that another process had; says if it had as many."""
    here = iterators_made(dataset)
    for number in range(here, count):
        iter(dataset)
        _made[dataset] = number + 1
    return here <= count or not pipelines.has_shuffles(dataset)
