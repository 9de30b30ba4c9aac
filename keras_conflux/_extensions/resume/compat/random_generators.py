"""The random generators of this process, and of data."""

import random
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from tensorflow.python.eager import context

from keras_conflux._extensions.resume.compat import pipelines


def present_global_seed() -> keras.Variable | None:
    """Returns the seed behind `keras.random`, if this thread has used it."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


def states(dataset: Any = None) -> dict[str, Any]:
    """Returns where the generators stand, also in a data set's functions."""
    eager = _of_eager_operations()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow": None if eager is None else eager.getstate(),
        "variables": variables(dataset),
    }


def set_states(saved: dict, dataset: Any = None, but: Any = ()) -> None:
    """Puts generators where they stood, also those in a data set."""
    if "python" not in but:
        random.setstate(saved["python"])
    if "numpy" not in but:
        np.random.set_state(saved["numpy"])
    eager, state = _of_eager_operations(), saved["tensorflow"]
    if "tensorflow" not in but and state is not None and eager is not None:
        eager.setstate(state)
    set_variables(dataset, saved["variables"])


def _of_eager_operations() -> random.Random | None:
    """Returns the generator of their seeds, if TensorFlow was given a seed."""
    return getattr(context.context(), "_rng", None)


def variables(dataset: Any) -> list[np.ndarray]:
    """Returns the values of the variables of a `tf.data.Dataset`."""
    return [x.numpy() for x in pipelines.variables_of_dataset(dataset)]


def set_variables(
    dataset: Any, values: list[np.ndarray], only: list[Any] | None = None
) -> None:
    """Gives the variables of a `tf.data.Dataset` their values.

    If `only` holds other values, those that still have these get theirs.
    """
    found = pipelines.variables_of_dataset(dataset)
    before = only or [None] * len(found)
    for variable, value, own in zip(found, values, before, strict=False):
        if own is None or np.array_equal(variable.numpy(), own):
            variable.assign(value)
