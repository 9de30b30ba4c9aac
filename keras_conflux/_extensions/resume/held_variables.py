"""The variables of all that a model holds or calls, tracked by Keras or not."""

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._extensions.resume import held_attributes
from keras_conflux._replication import state

_HOLDERS = (
    *(state.Replicable, keras.Loss, keras.Regularizer, keras.Initializer),
    *(keras.constraints.Constraint, functools.partial, types.SimpleNamespace),
)
_OF_OTHERS = {"keras", "keras_conflux", "tensorflow", "numpy"}
_OF_OTHERS |= sys.stdlib_module_names


def variables_of(model: keras.Model) -> list[Any]:
    """Returns each variable once, in an order that no trace changes.

    It finds variables of losses, regularizers and objects of the user's, and
    the ones that their functions use, which may be globals.
    """
    adopted = {id(variable) for variable in state.adopted(model)}
    tracked = [v for v in state.variables_of(model) if id(v) not in adopted]
    every = [*tracked, *_reachable(model)]
    # One of Keras comes before the one of TensorFlow that it holds.
    every.sort(key=lambda v: not isinstance(v, keras.Variable))
    found: dict[int, Any] = {}
    for variable in every:
        found.setdefault(id(state.backing(variable)), variable)
    return [*found.values()]


def names_of_lost(model: keras.Model) -> list[str]:
    """Returns the variables that steps write and the model does not hold."""
    held = {id(variable) for variable in variables_of(model)}
    return [v.path for v in state.adopted(model) if id(v) not in held]


def _reachable(target: Any) -> Iterator[Any]:
    """Yields the variables of an object and of all that it holds, each once."""
    seen: set[int] = set()
    waiting = [target]
    for item in waiting:  # which grows
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, keras.Variable | tf.Variable):
            yield item
        else:
            waiting += _parts(item)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [*item.values()]
    if isinstance(item, set):
        return sorted(item, key=lambda each: str(getattr(each, "name", each)))
    if isinstance(item, list | tuple):
        return [*item]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.FunctionType):
        return _used_by(item) if _is_of_user(item) else []
    if isinstance(item, tf.random.Generator):
        return [item.state]
    if isinstance(item, tf.types.experimental.PolymorphicFunction):
        return [item.python_function]
    if isinstance(item, _HOLDERS) or _is_of_user(type(item)):
        return [*held_attributes.held_by(item).values()]
    return []


def _used_by(function: types.FunctionType) -> list[Any]:
    """Returns the globals and cells of a function, but no classes or models."""
    used = inspect.getclosurevars(function)
    values = [*used.nonlocals.values(), *used.globals.values()]
    return [x for x in values if not isinstance(x, type | keras.Model)]


def _is_of_user(each: Any) -> bool:
    """Whether a class or function is none of Python's or a framework's."""
    return each.__module__.partition(".")[0] not in _OF_OTHERS
