"""The state of data besides the place in it: seeds taken, and a `PyDataset`.

A shuffle of tf.data takes a seed for each iterator that is made of it, or of
a data set that draws from it, by whomever. So its next order follows from all
iterators that were made before.
"""

import types
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._extensions.resume import held_attributes
from keras_conflux._extensions.resume import held_variables
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.compat import pipelines
from keras_conflux._extensions.resume.compat import private_state
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._graphs import walks

_SAVED = (
    *(keras.random.SeedGenerator, tf.random.Generator),
    *(keras.Variable, tf.Variable, held_variables.WITH_VARIABLES),
)
"""The state of code that comes back with the variables of data."""
_taken: Any = weakref.WeakKeyDictionary()
"""By data set that shuffles, how many seeds it has taken."""
_trained_on: Any = weakref.WeakSet()
"""Generators and shuffles that calls of `fit` with `Resume` have drawn from."""


class ValidationData:
    """Takes and gives back the state of a `fit`'s validation data."""

    def __init__(self, given: Any) -> None:
        source = keras.utils.unpack_x_y_sample_weight(given)[0]
        self.source = source
        self.dataset = source if isinstance(source, tf.data.Dataset) else None
        self.is_py_dataset = isinstance(source, keras.utils.PyDataset)
        owner = source if self.is_py_dataset else None
        self._held = held_attributes.HeldAttributes(owner, plain_values.mark)

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` takes."""
        return {
            "attributes": self._held.changed(),
            "variables": random_generators.variables(self.dataset),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Gives a `PyDataset` its state, and variables their values."""
        random_generators.set_variables(self.dataset, state["variables"])
        self._held.restore(state["attributes"])


def used_before(source: Any) -> Any:
    """Returns a generator that a former call has drawn from, else `None`."""
    is_generator = isinstance(source, types.GeneratorType)
    return source if is_generator and draws_again([source]) else None


def draws_again(sources: list[Any]) -> bool:
    """Notes what a call draws from, and whether a former one has done so."""
    known = any(each in _trained_on for each in sources)
    _trained_on.update(sources)
    return known


def note_iterator(
    original: Callable, dataset: tf.data.Dataset, *args: Any, **kwargs: Any
) -> Any:
    """Draws from a data set, for which each shuffle below takes a seed."""
    if tf.executing_eagerly():
        _count(pipelines.shuffles_below(dataset))
    return original(dataset, *args, **kwargs)


def _count(shuffles: Iterable[tf.data.Dataset], seeds: int = 1) -> None:
    for each in shuffles:
        _taken[each] = _taken.get(each, 0) + seeds


def enumerate_steps(original: Callable, iterator: Any) -> Iterator[tuple]:
    """Yields an epoch's steps; takes back seeds that nobody has taken.

    At the end of data Keras makes an iterator, which only a cut source needs.
    """
    dataset = private_state.dataset_of(iterator)
    later = [*pipelines.shuffles_begun_by_elements(dataset)]
    if private_state.draws_on(iterator) and private_state.is_undrawn(iterator):
        _count(later)
    yield from original(iterator)
    if private_state.is_undrawn(iterator):
        _count(later, -1)


def code_of(dataset: Any) -> list[Any]:
    """Returns the Python code that data calls as it is drawn, and its cells."""

    def inside(code: Any) -> list[Any]:
        cells = held_variables.cells_of(code)
        return [pipelines.generator_in(x) for _, x in cells]

    return [*walks.walked(pipelines.python_functions(dataset), inside)]


def draws_by_itself(dataset: Any, source: Any) -> bool:
    """Whether Python code of data has a random state that nobody saves."""
    saved = {*map(id, held_variables.held_by(source).values())}
    code = code_of(dataset)
    found = held_variables.reachable([source, code], held_attributes.RANDOM)
    drawn = shuffles_of([*held_variables.reachable(code, tf.data.Dataset)])
    return bool(drawn) or any(id(each) not in saved for each in found)


def may_draw(dataset: Any) -> bool:
    """Whether Python code of data names a global random generator."""
    used = [*walks.walked(code_of(dataset), held_variables.parts)]
    functions = [x for x in used if isinstance(x, types.FunctionType)]
    named = map(held_variables.names_used, functions)
    owners = {id(getattr(each, "__self__", None)) for each in used}
    drawn = owners.intersection(map(id, held_attributes.SAVED))
    return bool(drawn) or any("random" in names for names in named)


def state_of_code(datasets: list[Any]) -> held_variables.StateOfCode:
    """Returns the state of Python code that data calls, but for what is saved.

    Generators that it draws from are named before.
    """
    code = [each for dataset in datasets for each in code_of(dataset)]
    named = {*map(id, held_variables.reachable(code, held_attributes.RANDOM))}

    def is_saved(each: Any) -> bool:
        return id(each) in named or isinstance(each, _SAVED)

    return held_variables.StateOfCode(code, is_saved)


def shuffles_of(datasets: list[Any]) -> list[tf.data.Dataset]:
    """Returns once the shuffles that data sets draw from; none of other data.

    Each comes before those that it draws from itself.
    """
    every = [x for each in datasets for x in pipelines.shuffles_below(each)]
    found = {id(x): x for x in reversed(every)}
    return list(found.values())[::-1]


def seeds_taken(shuffles: list[tf.data.Dataset]) -> list[int]:
    """Returns how many seeds each one has taken, one for an iterator."""
    return [_taken.get(each, 0) for each in shuffles]


def take_seeds(shuffles: list[tf.data.Dataset], counts: list[int]) -> None:
    """Lets each take the seeds that it had taken in another process."""
    for each, count in zip(shuffles, counts, strict=False):
        for _ in range(count - _taken.get(each, 0)):
            _count(pipelines.shuffles_begun_by_elements(each), -1)
            iter(each)
