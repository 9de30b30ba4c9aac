"""What an optimizer writes to a variable."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_internals
from keras_conflux._compat import keras_variables
from keras_conflux._fit.numerics.sparse_gradients import each_once
from keras_conflux._replication import whole_batch
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import replica_collectives


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


def add(original: Callable, optimizer: Any, variable: Any, value: Any) -> None:
    """Adds or subtracts, after the rows that repeat are added up."""
    write(original, optimizer, variable, _repeatable(value))


def _is_tensor_here(variable: Any) -> bool:
    scope = keras_internals.stateless_scope()
    return isinstance(scope, GivenTensors) and isinstance(
        variable, keras.Variable
    )


def _repeatable(value: Any) -> Any:
    """Makes a sparse update leave the same bits in the copies of all replicas.

    TensorFlow adds repeated rows to a variable in any order, as its threads
    come. Only what is written is added up here: what Keras' optimizers make of
    each row of a gradient before, such as its squares, is as on one device.
    """
    is_sparse = isinstance(value, tf.IndexedSlices)
    # XLA has one replica here; several on GPUs have dense gradients.
    if is_sparse and _has_copies():
        return each_once(value)
    return value


def _has_copies() -> bool:
    strategy = whole_batch.current()
    if strategy is not None:
        return strategy.communicator.size > 1
    return in_replica() and replica_collectives().count > 1
