"""The iterators by which the loops of Keras draw batches."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters

from keras_conflux._compat import tensorflow_pipelines


def dataset_of(iterator: Any) -> Any:
    """Returns the data set that an epoch iterator of Keras draws from."""
    return iterator._distributed_dataset


def py_dataset_of(iterator: Any) -> Any:
    """Returns the `PyDataset` behind an epoch iterator of Keras, or `None`."""
    return getattr(iterator.data_adapter, "py_dataset", None)


def count_iterators(iterator: Any, before_each: Callable[[], None]) -> None:
    """Calls a function before an epoch iterator begins to draw anew."""
    make = iterator._get_iterator

    def counted() -> Any:
        before_each()
        return make()

    iterator._get_iterator = counted


def draws_on(iterator: Any) -> bool:
    """Whether the next epoch goes on with an iterator that has begun."""
    cut = iterator.steps_per_epoch is not None
    return cut and iterator._current_iterator is not None


def set_learned_number(iterator: Any, number: int | None) -> None:
    """Tells an epoch iterator what it learns at the end of its first epoch."""
    if iterator.num_batches is None:
        iterator._num_batches = number


def add_steps_seen(iterator: Any, steps: int) -> None:
    """Tells an epoch iterator that batches of its data are used already."""
    iterator._steps_seen += steps


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


def calls_python(iterator: Any) -> bool:
    """Whether Python code of the user's runs where batches are drawn.

    Besides what `has_python_source` names, a `tf.data.Dataset` may call it.
    """
    if has_python_source(iterator):
        return True
    dataset = dataset_of(iterator)
    return isinstance(dataset, tf.data.Dataset) and any(
        tensorflow_pipelines.is_python(operation)
        for each in tensorflow_pipelines.datasets_below(dataset)
        for operation in tensorflow_pipelines.operations_of_dataset(each)
    )


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
