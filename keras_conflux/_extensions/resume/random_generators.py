"""The random generators of this process, and of data."""

import random
from typing import Any

import numpy as np

from keras_conflux._extensions.resume.compat import pipelines
from keras_conflux._extensions.resume.compat import private_state


def states(dataset: Any = None) -> dict[str, Any]:
    """Returns where Python's, NumPy's and TensorFlow's generators stand.

    Args:
        dataset: A `tf.data.Dataset`, whose functions may have variables, such
            as of a `keras.random.SeedGenerator`.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow": private_state.eager_seed_state(),
        "variables": variables(dataset),
    }


def set_states(saved: dict[str, Any], dataset: Any = None) -> None:
    """Puts the generators where they stood, also those in a data set."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    private_state.set_eager_seed_state(saved["tensorflow"])
    set_variables(dataset, saved["variables"])


def variables(dataset: Any) -> list[np.ndarray]:
    """Returns the values of the variables of a `tf.data.Dataset`."""
    found = pipelines.variables_of_dataset(dataset)
    return [each.numpy() for each in found]


def set_variables(dataset: Any, values: list[np.ndarray]) -> None:
    """Gives the variables of a `tf.data.Dataset` their values."""
    found = pipelines.variables_of_dataset(dataset)
    for variable, value in zip(found, values, strict=False):
        variable.assign(value)
