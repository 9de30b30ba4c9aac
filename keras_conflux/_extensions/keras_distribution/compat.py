"""The insides of Keras that `keras.distribution` on TensorFlow needs."""

from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow import (
    distribution_lib as backend_distribution,
)


def provide_distribution(*functions: Callable[..., Any]) -> None:
    """Gives Keras' TensorFlow backend functions for `keras.distribution`.

    Args:
        *functions: Found by their names, which are the names in other backends.
    """
    # keras.src.distribution calls them on this module. In 3.14.0 and 3.15.1
    # it has `list_devices`, which works, and attempts at DTensor.
    for function in functions:
        setattr(backend_distribution, function.__name__, function)


def take_whole_datasets(distribution: Any) -> None:
    """Keeps a distribution of several processes from sharding data sets."""
    distribution._is_multi_process = False
