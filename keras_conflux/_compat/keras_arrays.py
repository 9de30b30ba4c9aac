"""The arrays that Keras' `fit` trains on."""

import types
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing


def shuffles_samples(adapter: Any) -> bool:
    """Whether an adapter of arrays yields their samples in random order."""
    return bool(adapter._shuffle) and adapter._shuffle != "batch"


def reshuffled(adapter: Any) -> tf.data.Dataset:
    """Returns the batches of an adapter, in another order for each iterator.

    The orders follow from TensorFlow's global seed, if there is one.
    """
    count, size = adapter._num_samples, adapter._batch_size
    is_even = count % size == 0
    inputs = keras.tree.lists_to_tuples(adapter._inputs)
    with tf.device("CPU:0"):
        arrays = keras.tree.traverse(
            _as_tensor,
            array_slicing.convert_to_sliceable(
                inputs, target_backend="tensorflow"
            ),
        )

    def rows_of_batches(seed: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(count, dtype=tf.int64), tf.stack([seed, 0])
        )
        places = tf.data.Dataset.range(count).batch(size, is_even)
        return places.map(lambda places: tf.gather(order, places))

    def batch(rows: tf.Tensor) -> Any:
        return keras.tree.traverse(lambda array: _taken(array, rows), arrays)

    seeds = tf.data.Dataset.random(rerandomize_each_iteration=True)
    batches = seeds.take(1).flat_map(rows_of_batches)
    batches = batches.map(batch, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE)


def _as_tensor(array: Any) -> Any:
    """Returns an array as a tensor; `None` for a structure of arrays."""
    if isinstance(array, array_slicing.TensorflowSparseWrapper):
        return array
    if isinstance(array, tuple | dict | types.NoneType):
        return None
    return array if tf.is_tensor(array) else tf.convert_to_tensor(array)


def _taken(array: Any, rows: tf.Tensor) -> Any:
    """Returns rows of a tensor; `None` for a structure of tensors."""
    if isinstance(array, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(array, rows)
    return tf.gather(array, rows) if tf.is_tensor(array) else None
