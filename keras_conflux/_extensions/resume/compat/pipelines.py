"""The parts of a `tf.data.Dataset`."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux._graphs import walks


def datasets_below(dataset: Any) -> Iterator[tf.data.Dataset]:
    """Yields a data set and its inputs; nothing for other data."""
    if isinstance(dataset, tf.data.Dataset):
        yield dataset
        for each in _inputs(dataset):
            yield from datasets_below(each)


def _inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the inputs; of a reader of files, the data set of its files.

    It may hold another one, of their names, of which that is made.
    """
    held = [x for x in vars(dataset).values() if isinstance(x, tf.data.Dataset)]
    return dataset._inputs() or held[-1:]


def has_unknown_parts(dataset: tf.data.Dataset) -> bool:
    """Whether it draws from data sets that are not among its inputs.

    A function that names a data set made outside of it, as a `flat_map`'s may,
    has captured its tensor alone. So has a `Dataset.from_tensors` of them, and
    what TensorFlow makes of the `choice_dataset` of `choose_from_datasets`.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    gives_them = any(isinstance(spec, tf.data.DatasetSpec) for spec in specs)
    captured = (
        each.dtype == tf.variant
        for function in dataset._functions()
        for each in function.function.captured_inputs
    )
    if dataset._inputs():
        return any(captured)
    return gives_them or any(captured) or _is_rewritten_and_varies(dataset)


_VARYING = re.compile(rb"Shuffle|(?<!Stateless)Random|PyFunc|Variable|Rng")
"""Operations by which elements may be others each time have such names."""


def _is_rewritten_and_varies(dataset: tf.data.Dataset) -> bool:
    if not isinstance(dataset, _rewritten()):
        return False
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=1,
    )
    return bool(_VARYING.search(graph.numpy()))


@functools.cache
def _rewritten() -> type:
    made, numbers = tf.data.experimental, tf.data.Dataset.range(1)
    return type(made.from_variant(made.to_variant(numbers), tf.TensorSpec(())))


def seeds_of_dataset(dataset: tf.data.Dataset) -> list[int] | None:
    """Returns the seeds that a data set shuffles or draws by, if it does."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if any(seed is None for seed in seeds):
        return None
    return [int(tf.get_static_value(seed)) for seed in seeds]


def is_out_of_order(dataset: tf.data.Dataset) -> bool:
    """Whether a data set yields the elements that are ready first."""
    return getattr(dataset, "_deterministic", None) == "false"


def is_parallel(dataset: tf.data.Dataset) -> bool:
    """Whether a data set calls its function several times at once."""
    calls = getattr(dataset, "_num_parallel_calls", None)
    return calls is not None and tf.get_static_value(calls) != 1


def operations_of_dataset(dataset: tf.data.Dataset) -> list[tf.Operation]:
    """Returns the operations of all functions that a data set calls."""
    every = walks.walked(
        [each.function.graph for each in dataset._functions()],
        lambda graph: [each.graph for each in graph._functions.values()],
    )
    return [each for graph in every for each in graph.get_operations()]


def caches_below(dataset: Any) -> Iterator[tf.data.Dataset]:
    """Yields the data sets that this process draws once, and keeps."""
    for each in datasets_below(dataset):
        file = getattr(each, "_filename", None)  # of a cache alone
        if file is not None and not tf.get_static_value(file):
            yield each


def variables_of_dataset(dataset: Any) -> list[tf.Variable]:
    """Returns the variables that the functions of data sets read or change.

    TensorFlow has them in an order of this process; here it is of their use.
    """
    functions = [f for x in datasets_below(dataset) for f in x._functions()]
    found = {id(v.handle): v for f in functions for v in f.function.variables}
    used = (id(x) for f in functions for x in f.function.captured_inputs)
    return [found[x] for x in dict.fromkeys(used) if x in found]


def python_functions(dataset: Any) -> list[Any]:
    """Returns the functions of data sets that call Python code when drawn."""
    return [
        getattr(function, "_func", None)
        for each in datasets_below(dataset)
        if any(map(is_python, operations_of_dataset(each)))
        for function in each._functions()
    ]


def generator_in(value: Any) -> Any:
    """Returns what `from_generator` was given, if a value holds that."""
    return getattr(value, "_generator", value)


def is_python(operation: tf.Operation) -> bool:
    """Whether an operation calls Python code."""
    return operation.type in _PYTHON


_PYTHON = ("EagerPyFunc", "GeneratorDataset", "PyFunc", "PyFuncStateless")


def shuffles_below(dataset: Any) -> Iterator[tf.data.Dataset]:
    """Yields the data sets that take a seed for each iterator made of one."""
    for each in datasets_below(dataset):
        if seeds_of_dataset(each) is not None or has_unknown_parts(each):
            yield each


def shuffles_begun_by_elements(dataset: Any) -> Iterator[tf.data.Dataset]:
    """Yields those below a shuffle, which begins them with an element."""
    if isinstance(dataset, tf.data.Dataset):
        waits = seeds_of_dataset(dataset) is not None
        find = shuffles_below if waits else shuffles_begun_by_elements
        for each in _inputs(dataset):
            yield from find(each)


def begins_shuffles_later(dataset: Any) -> bool:
    """Whether a data set takes seeds also while it is drawn from."""
    return any(
        isinstance(each, _that_begin_later()) and [*shuffles_below(each)]
        for each in datasets_below(dataset)
    )


@functools.cache
def _that_begin_later() -> tuple[type, ...]:
    numbers = tf.data.Dataset.range(1)
    made = numbers.cache(), numbers.concatenate(numbers), numbers.repeat()
    return tuple(map(type, made))
