"""The random generators of this process."""

import random
from typing import Any

import numpy as np

from keras_conflux._compat import tensorflow_internals


def states() -> dict[str, Any]:
    """Returns where Python's, NumPy's and TensorFlow's generators stand."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow": tensorflow_internals.eager_seed_state(),
    }


def set_states(saved: dict[str, Any]) -> None:
    """Puts the generators where they stood."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    tensorflow_internals.set_eager_seed_state(saved["tensorflow"])
