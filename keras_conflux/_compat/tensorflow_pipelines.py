"""What a `tf.data.Dataset` is made of."""

from collections.abc import Iterator

import tensorflow as tf


def datasets_below(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a data set and those that it is made of."""
    yield dataset
    for each in dataset._inputs():
        yield from datasets_below(each)


def seeds_of_dataset(dataset: tf.data.Dataset) -> tuple[int, int] | None:
    """Returns the seeds that a data set shuffles or draws by, if it does."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if any(seed is None for seed in seeds):
        return None
    return int(tf.get_static_value(seeds[0])), int(
        tf.get_static_value(seeds[1])
    )


def is_out_of_order(dataset: tf.data.Dataset) -> bool:
    """Whether a data set yields what is ready first."""
    return getattr(dataset, "_deterministic", None) == "false"


def operations_of_dataset(dataset: tf.data.Dataset) -> list[tf.Operation]:
    """Returns the operations of the functions that a data set calls.

    Those of functions inside of these are among them, such as of a data set
    that an `interleave` makes of each element.
    """
    found: list[tf.Operation] = []
    waiting = [each.function.graph for each in dataset._functions()]
    seen = set()
    while waiting:
        graph = waiting.pop()
        if id(graph) not in seen:
            seen.add(id(graph))
            found += graph.get_operations()
            waiting += [each.graph for each in graph._functions.values()]
    return found


def is_python(operation: tf.Operation) -> bool:
    """Whether an operation calls Python code."""
    return operation.type in _PYTHON


_PYTHON = ("EagerPyFunc", "GeneratorDataset", "PyFunc", "PyFuncStateless")
