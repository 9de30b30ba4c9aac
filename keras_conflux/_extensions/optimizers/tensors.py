"""Optimizers read and write tensors in place of variables."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._extensions.optimizers import compat


class GivenTensors(keras.StatelessScope):
    """In it, an optimizer reads and writes tensors in place of variables."""


def key(original: Callable, optimizer: Any, variable: Any) -> Any:
    """Returns what an optimizer knows a variable by.

    Keras asks the `value` for its id, which a tensor does not have.
    """
    if _is_tensor_here(variable):
        variable = keras_variables.backing(variable)
    return original(optimizer, variable)


def write(
    original: Callable, optimizer: Any, variable: Any, value: Any
) -> None:
    """Writes a variable, or the tensor that is given for it.

    Args:
        original: A method of the optimizer. A variable has one of its name.
        optimizer: Whose method it is.
        variable: What is written.
        value: What it is set to, or what is added or subtracted.
    """
    if _is_tensor_here(variable):
        value = tf.cast(value, variable.dtype)
        getattr(variable, original.__name__)(value)
    else:
        original(optimizer, variable, value)


def _is_tensor_here(variable: Any) -> bool:
    scope = compat.stateless_scope()
    return isinstance(scope, GivenTensors) and isinstance(
        variable, keras.Variable
    )
