"""The variables of all that a model holds or calls, tracked by Keras or not."""

import collections
import functools
import inspect
import types
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._extensions.resume import users_code
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._replication import state
from keras_conflux._replication import traced_functions

_HOLDERS = (
    *(state.Replicable, keras.Loss, keras.Regularizer, keras.Initializer),
    *(keras.constraints.Constraint, functools.partial, types.SimpleNamespace),
)
_OF_FUNCTIONS = types.MethodType | staticmethod | classmethod | property


def variables_of(model: keras.Model) -> list[Any]:
    """Returns each variable once, in an order that no trace changes.

    It finds variables of losses, regularizers and objects of the user's, and
    the ones that their functions use, which may be globals.
    """
    adopted = {id(variable) for variable in state.adopted(model)}
    tracked = [v for v in state.variables_of(model) if id(v) not in adopted]
    every = [*tracked, *reachable(model, keras.Variable | tf.Variable)]
    # One of Keras replaces the one of TensorFlow that it holds.
    every.sort(key=lambda v: isinstance(v, keras.Variable))
    return [*{id(state.backing(v)): v for v in every}.values()]


def said_of_lost(model: keras.Model, names: Sequence[str] = ()) -> str:
    """Returns a warning of all that steps change and nobody saves, if any.

    The names are the ones of variables that the first step has made.
    """
    seed = random_generators.present_global_seed()
    saved = [*variables_of(model), *([] if seed is None else [seed])]
    held = {id(x.handle) for each in saved for x in state.copies(each)}
    adopted: Any = state.adopted(model)
    lost = {id(state.copies(each)[0].handle): each for each in adopted}
    for graph in traced_functions.traces_of_keras(model.train_function):
        for x, writes in effects.writes(graph):
            found = id(x) not in held and effects.changes(graph, x, writes)
            if found:
                lost |= {id(x): found[0]} | resources.variables_behind([x])
    for each in (x for handle, x in lost.items() if handle not in held):
        is_other = isinstance(each, tf.Operation)
        name = f"what {each.type} changes" if is_other else state.name_of(each)
        names = [*names, name]
    return bool(names) * (
        "This training cannot be resumed exactly, because its steps change "
        "what the model does not hold, or not before its first step: "
        f"{', '.join(names)}. Before training, make each a `keras.Variable` "
        "in an attribute of the model, a layer or a loss, and build a metric "
        "by a batch and `reset_state()`."
    )


def reachable(target: Any, kinds: Any) -> Iterator[Any]:
    """Yields what is of some kinds in all that an object holds or calls."""
    seen: set[int] = set()
    waiting = [target]
    for item in waiting:  # which grows
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            yield item
        else:
            waiting += _parts(item)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict | list | tuple | collections.deque):
        return [*users_code.contents(item).values()]  # a set has no order
    if isinstance(item, _OF_FUNCTIONS):
        names = "__self__", "__func__", "fget"
        return [getattr(item, name, None) for name in names]
    if isinstance(item, types.FunctionType):
        return [*_used_by(item)] if users_code.is_of_user(item) else []
    if isinstance(item, type):
        return [*vars(item).values()] if users_code.is_of_user(item) else []
    if isinstance(item, tf.random.Generator):
        return [item.state]
    if isinstance(item, tf.types.experimental.PolymorphicFunction):
        return [item.python_function]
    if isinstance(item, _HOLDERS) or users_code.is_of_user(type(item)):
        return [*users_code.held_by(item).values()]
    return []


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """Yields what a function uses: defaults, cells, and globals by name."""
    yield function.__defaults__ or ()
    yield function.__kwdefaults__ or {}
    yield from dict(users_code.cells_of(function)).values()
    codes = [function.__code__]
    for code in codes:  # which grow by the functions inside
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    names = [*dict.fromkeys(name for code in codes for name in code.co_names)]
    scopes = [function.__globals__]
    for scope in scopes:
        for found in [scope[name] for name in names if name in scope]:
            if inspect.ismodule(found):
                is_known = any(vars(found) is each for each in scopes)
                if users_code.is_of_user(found) and not is_known:
                    scopes.append(vars(found))
            elif not isinstance(found, keras.Model):
                yield found
