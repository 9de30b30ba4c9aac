"""The iterators by which the loops of Keras draw batches."""

from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters


def batch_spec(iterator: Any) -> Any:
    """Returns the `tf.TypeSpec`s that an epoch iterator of Keras yields."""
    spec = iterator._distributed_dataset.element_spec
    return keras.tree.map_structure(_first_spec, spec)


def has_python_source(iterator: Any) -> bool:
    """Whether an epoch iterator of Keras draws from Python code of the user's.

    That is a generator, a `PyDataset` or another library's data set.
    """
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
