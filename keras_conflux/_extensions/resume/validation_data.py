"""Where the validation of a `fit` stands in its data.

Each evaluation draws from the beginning. So it is enough to know which
iterators have been made, and the state of a `PyDataset`.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._extensions.resume import iterator_history
from keras_conflux._extensions.resume import random_generators
from keras_conflux._extensions.resume.py_dataset_state import PyDatasetState


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
