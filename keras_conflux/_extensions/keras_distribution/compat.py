"""The insides of Keras that `keras.distribution` on TensorFlow needs."""

from collections.abc import Callable
from typing import Any

from keras_conflux._compat.private_names import module_if_any

_MODULE = "keras.src.backend.tensorflow.distribution_lib"
backend_distribution = module_if_any(_MODULE)


def provide_distribution(**functions: Callable[..., Any]) -> None:
    """Gives Keras' backend functions, by their names in other backends."""
    # keras.src.distribution calls them on this module. In 3.14.0 and 3.15.1
    # it has `list_devices`, which works, and attempts at DTensor.
    for name, function in functions.items():
        setattr(backend_distribution, name, function)


def take_whole_datasets(distribution: Any) -> None:
    """Keeps a distribution of several processes from sharding data sets."""
    distribution._is_multi_process = False
