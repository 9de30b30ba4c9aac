"""The iterators from which batches are drawn, of Keras and of TensorFlow."""

import types
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing


def batch_spec(iterator: Any) -> Any:
    """Returns the `tf.TypeSpec`s that an epoch iterator of Keras yields."""
    spec = iterator._distributed_dataset.element_spec
    return keras.tree.map_structure(_first_spec, spec)


def has_python_source(iterator: Any) -> bool:
    """Whether Python code of the user's yields the data of an iterator."""
    plain = data_adapters.ArrayDataAdapter | data_adapters.TFDatasetAdapter
    return not isinstance(iterator.data_adapter, plain)


def set_number_of_batches(iterator: Any, number: int | None) -> None:
    """Tells an epoch iterator of Keras how many batches its data have."""
    # It asks its adapter once more when it is reset.
    iterator.data_adapter = _Counted(iterator.data_adapter, number)
    iterator._num_batches = number


class _Counted:
    """A data adapter of Keras that tells another number of batches."""

    def __init__(self, adapter: Any, number: int | None) -> None:
        self._adapter = adapter
        self.num_batches = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


_NO_TENSOR = type(tf.type_spec_from_value(None))


def _first_spec(spec: Any) -> Any:
    # Where a batch has None, Keras' adapters put an Optional or leave it. A
    # PerReplicaSpec, of a DistributedDataset, holds one spec a replica.
    if isinstance(spec, tf.OptionalSpec | _NO_TENSOR):
        return None
    return getattr(spec, "_value_specs", (spec,))[0]


def shuffles_samples(adapter: Any) -> bool:
    """Whether an adapter of arrays yields their samples in random order."""
    return bool(adapter._shuffle) and adapter._shuffle != "batch"


def reshuffled(adapter: Any) -> tf.data.Dataset:
    """Returns batches in another order, by the seed, for each iterator."""
    count, size = adapter._num_samples, adapter._batch_size
    is_even = count % size == 0
    inputs = keras.tree.lists_to_tuples(adapter._inputs)
    to_slice = array_slicing.convert_to_sliceable
    with tf.device("CPU:0"):
        arrays = to_slice(inputs, target_backend="tensorflow")
        arrays = keras.tree.traverse(_as_tensor, arrays)

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


def next_of(iterator: Any) -> Any:
    """Returns the next element, as `next` would.

    On GPUs, operations of other threads may get TensorFlow's error for the end
    of data (see the notes). So an empty optional tells it.
    """
    if not isinstance(iterator, tf.data.Iterator):
        return next(iterator)
    found: Any = iterator.get_next_as_optional()
    if not found.has_value():
        raise StopIteration
    return found.get_value()
