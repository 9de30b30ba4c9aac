"""The data sets that a function of a data set draws from.

A function that names a data set made outside of it, as a `flat_map`'s may,
has captured its tensor. The data set itself is found by its name.
"""

import contextlib
import functools
import types
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def captures_any(dataset: tf.data.Dataset) -> bool:
    """Whether functions of a data set draw from others made outside."""
    return bool(_captured_tensors(dataset))


def has_unknown_parts(dataset: tf.data.Dataset) -> bool:
    """Whether it draws from data sets that cannot be found.

    Functions may have them by no name, or they may be the elements of a source
    such as `Dataset.from_tensors`, which keeps their tensors alone.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    is_source_of_them = not dataset._inputs() and any(
        isinstance(spec, tf.data.DatasetSpec) for spec in specs
    )
    captured = len(_captured_tensors(dataset))
    return is_source_of_them or captured > len(captured_datasets(dataset))


def captured_datasets(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns those that functions have by a name.

    A method may have it in its object, and a `functools.partial` in its
    arguments.
    """
    captured = _captured_tensors(dataset)
    if not captured:
        return []
    named = {
        id(each._variant_tensor): each
        for function in dataset._functions()
        for each in _datasets_in(_values_of(function._func))
    }
    return [named[key] for key in captured & named.keys()]


def _captured_tensors(dataset: tf.data.Dataset) -> set[int]:
    return {
        id(captured)
        for each in dataset._functions()
        for captured in each.function.captured_inputs
        if captured.dtype == tf.variant
    }


def _values_of(function: Any) -> Iterator[Any]:
    """Yields the values that a function has by names."""
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    if isinstance(function, types.MethodType):
        yield from getattr(function.__self__, "__dict__", {}).values()
        function = function.__func__
    if isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty by now
                yield cell.cell_contents
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        for name in _names_in(function.__code__):
            yield function.__globals__.get(name)


def _datasets_in(values: Iterable[Any]) -> Iterator[tf.data.Dataset]:
    """Yields data sets among values, and in their lists, tuples and dicts."""
    waiting, seen = [*values], set()
    while waiting and len(seen) < _MOST:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, tf.data.Dataset):
            yield each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


_MOST = 100_000
"""So many values are looked at: a global may be a list of millions."""


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the global names of a function and of those inside of it."""
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, types.CodeType):
            yield from _names_in(inside)
