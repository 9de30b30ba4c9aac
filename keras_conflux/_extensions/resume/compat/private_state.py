"""The state of callbacks and of epoch iterators that Keras keeps to itself."""

from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._compat.keras_iterators import has_python_source
from keras_conflux._extensions.resume.compat import pipelines


def flush_callbacks(callbacks: keras.callbacks.CallbackList) -> None:
    """Waits for callbacks that work in other threads."""
    for future in callbacks._futures:
        future.result()


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


def is_undrawn(iterator: Any) -> bool:
    """Whether nobody has drawn from the latest iterator that Keras has made."""
    return iterator._current_iterator is not None and not iterator._steps_seen


def set_learned_number(iterator: Any, number: int | None) -> None:
    """Tells an epoch iterator the number it learns in its first epoch."""
    if iterator.num_batches is None:
        iterator._num_batches = number


def add_steps_seen(iterator: Any, steps: int) -> None:
    """Tells an epoch iterator that batches of its data are used already."""
    iterator._steps_seen += steps


def calls_python(iterator: Any) -> bool:
    """Whether Python code of the user's runs where batches are drawn."""
    functions = pipelines.python_functions(dataset_of(iterator))
    return has_python_source(iterator) or bool(functions)
