"""What an optimizer adds to the copies of a variable."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._fit.numerics.sparse_gradients import each_once
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import whole_batch_strategy


def add(original: Callable, optimizer: Any, variable: Any, value: Any) -> None:
    """Adds or subtracts, after the rows that repeat are added up."""
    original(optimizer, variable, _repeatable(value))


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
    strategy = whole_batch_strategy()
    if strategy is not None:
        return strategy.communicator.size > 1
    return in_replica() and replica_collectives().count > 1
