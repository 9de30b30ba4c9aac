"""Sparse updates that leave the same bits in the copies of all replicas."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import replica_collectives


def write(
    original: Callable, optimizer: Any, variable: Any, value: Any
) -> None:
    """Adds up the rows of a sparse update that repeat, and then writes it.

    TensorFlow adds repeated rows to a variable in any order, as its threads
    come. Only what is written is added up here: what Keras' optimizers make of
    each row of a gradient before, such as its squares, is as on one device.
    """
    is_sparse = isinstance(value, tf.IndexedSlices)
    # XLA has one replica here; several on GPUs have dense gradients.
    if is_sparse and in_replica() and replica_collectives().count > 1:
        value = _each_row_once(value)
    original(optimizer, variable, value)


def _each_row_once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    rows, positions = tf.unique(slices.indices)
    # On CPU devices, one thread adds up all parts of a row, in their order.
    values = tf.math.unsorted_segment_sum(
        slices.values, positions, tf.size(rows)
    )
    return tf.IndexedSlices(values, rows, slices.dense_shape)
