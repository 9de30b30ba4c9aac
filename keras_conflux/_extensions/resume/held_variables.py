"""The state of all that a model or code of the user's holds or calls."""

import argparse
import collections
import contextlib
import functools
import inspect
import io
import itertools
import logging
import sys
import types
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._graphs import walks
from keras_conflux._replication import state
from keras_conflux._replication import traced_functions

OF_KERAS = ("keras.", "keras_conflux.")
_OF_OTHERS = {"keras", "keras_conflux", "tensorflow", "numpy"}
_OF_OTHERS |= sys.stdlib_module_names
FUNCTIONS = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(types.MethodWrapperType, functools.partial),
)
WITH_VARIABLES = keras.Layer | keras.Optimizer | keras.Metric
"""Objects of Keras, whose state is in variables."""
_NAMESPACE = types.SimpleNamespace | argparse.Namespace
_OTHERS = WITH_VARIABLES | logging.Logger | io.IOBase
CONTAINERS = (dict, list, tuple, collections.deque)
_SCALARS = (bool, int, float, complex, str, bytes, types.NoneType)
_MOST = 1000
"""Containers of more values mostly hold samples, which are not looked into."""
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
            waiting += parts(item)


def parts(item: Any) -> list[Any]:
    """Returns what an object holds or calls, of the user's at least."""
    if isinstance(item, CONTAINERS):
        return inside(item)  # a set has no order
    if isinstance(item, _OF_FUNCTIONS):
        names = "__self__", "__func__", "fget"
        return [getattr(item, name, None) for name in names]
    if isinstance(item, types.FunctionType):
        return [*_used_by(item)] if is_of_user(item) else []
    if isinstance(item, type):
        return [*vars(item).values()] if is_of_user(item) else []
    if isinstance(item, tf.random.Generator):
        return [item.state]
    if isinstance(item, tf.types.experimental.PolymorphicFunction):
        return [item.python_function]
    if isinstance(item, _HOLDERS) or is_of_user(type(item)):
        return [*held_by(item).values()]
    return []


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """Yields what a function uses: defaults, cells, and globals by name."""
    yield function.__defaults__ or ()
    yield function.__kwdefaults__ or {}
    yield from dict(cells_of(function)).values()
    names = names_used(function)
    scopes = [function.__globals__]
    for scope in scopes:
        for found in [scope[name] for name in names if name in scope]:
            if inspect.ismodule(found):
                is_known = any(vars(found) is each for each in scopes)
                if is_of_user(found) and not is_known:
                    scopes.append(vars(found))
            elif not isinstance(found, keras.Model):
                yield found


def names_used(function: types.FunctionType) -> list[str]:
    """Returns the names of globals and attributes that a function uses."""
    codes = [function.__code__]
    for code in codes:  # which grow by the functions inside
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    return [*dict.fromkeys(name for code in codes for name in code.co_names)]


class StateOfCode:
    """Tells what functions, and the objects that they use, have changed."""

    def __init__(
        self, code: Iterable[Any], is_saved: Callable[[Any], bool]
    ) -> None:
        self._is_saved = is_saved
        self._holders = [*walks.walked(code, self._held_by)]
        self._marks = self._now()
        self._told: set[str] = set()

    def changed(self) -> set[str]:
        """Returns names of what is not as it was, or may not be, each once.

        An object that is made when it is needed is made by a restart as well.
        """
        now, before = self._now(), self._marks
        keys = {x for x in now | before if now.get(x) != before.get(x)}
        for key in {x for x in keys if before.get(x) is None}:
            if isinstance(now.get(key), _Identity):
                before[key] = now[key]
                keys.remove(key)
        changed = {name for _, name in keys}
        new, self._told = changed - self._told, changed | self._told
        return new

    def _held_by(self, holder: Any) -> list[Any]:
        if isinstance(holder, CONTAINERS) and len(holder) > _MOST:
            return []
        return [x for x in contents(holder).values() if not self._is_saved(x)]

    def _now(self) -> dict[tuple[int, str], Any]:
        return {
            (i, name): self._mark(value)
            for i, holder in enumerate(self._holders)
            if not isinstance(holder, CONTAINERS)
            if not isinstance(holder, types.FunctionType) or is_of_user(holder)
            for name, value in contents(holder).items()
            if not self._is_saved(value)
        }

    def _mark(self, value: Any, depth: int = 0) -> Any:
        """Returns a mark of what a value is, `None` if it tells nothing."""
        if isinstance(value, _SCALARS):
            return value and (value,)  # where a NaN equals itself
        if isinstance(value, set | frozenset):
            return frozenset(value)
        if isinstance(value, CONTAINERS):
            values = value.values() if isinstance(value, dict) else ()
            known = _SCALARS if len(value) > _MOST or depth > 3 else object
            marks = (
                self._mark(x, depth + 1) if isinstance(x, known) else id(x)
                for x in (*value, *values)
            )
            return (*marks,)
        if isinstance(value, WITH_VARIABLES):
            owned = [x for x in value.variables if not self._is_saved(x)]
            return (*(plain_values.mark(each.numpy()) for each in owned),)
        if access := plain_values.access(value):
            value = plain_values.State(access[0]())
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return (*map(id, value.flat),)
        if not isinstance(value, tf.Tensor) and plain_values.is_plain(value):
            return plain_values.mark(value)
        if isinstance(value, (*FUNCTIONS, io.IOBase)):
            return None
        if isinstance(value, Iterator):  # nobody can tell where it stands
            return next(_any)
        return _Identity(id(value))


_any = itertools.count()


class _Identity(int):
    """The mark of an object."""


def contents(holder: Any) -> dict[str, Any]:
    """Returns what a function, a list or an object of the user's holds."""
    if isinstance(holder, functools.partial):
        return {"func": holder.func, "args": holder.args} | holder.keywords
    if isinstance(holder, types.FunctionType):
        defaults = {"defaults": (holder.__defaults__, holder.__kwdefaults__)}
        return defaults | vars(holder) | dict(cells_of(holder))
    if isinstance(holder, FUNCTIONS):
        inner = getattr(holder, "__func__", None)
        return {"self": holder.__self__, "function": inner}
    if isinstance(holder, CONTAINERS):
        return {str(i): each for i, each in enumerate(inside(holder))}
    if isinstance(holder, type):
        held = vars(holder).items() if _is_own(holder) else ()
        return {k: v for k, v in held if not k.startswith("__")}
    if not _is_own(type(holder)) or isinstance(holder, _OTHERS):
        return {}
    own = {k: v for k, v in held_by(holder).items() if "." not in k}
    return own | {"class": type(holder)}


def inside(container: Any) -> list[Any]:
    """Returns the elements of a container, or none of another object."""
    if not isinstance(container, CONTAINERS) or len(container) >= 10_000:
        return []  # long ones hold data
    return [*(container.values() if isinstance(container, dict) else container)]


def held_by(owner: Any) -> dict[str, Any]:
    """Returns what an object holds by name, in classes by their names, too."""
    found = {}
    for each in reversed(type(owner).__mro__):
        for name, value in vars(each).items():
            if isinstance(value, types.MemberDescriptorType):  # a slot
                with contextlib.suppress(Exception):
                    found[name] = getattr(owner, name)
            elif not str(each.__module__).startswith(OF_KERAS):
                found[f"{each.__name__}.{name}"] = value
    with contextlib.suppress(Exception):  # of a `__getattr__`, as of a proxy
        found |= vars(owner)
    return found


def is_of_user(each: Any) -> bool:
    """Whether it is of no module of Python's or of a framework."""
    module = str(getattr(each, "__module__", None) or each.__name__)
    return module.partition(".")[0] not in _OF_OTHERS


def _is_own(kind: type) -> bool:
    """Whether a class is of the program, and of no package in use."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    is_own = is_of_user(kind) and "-packages" not in file
    return is_own or issubclass(kind, _NAMESPACE)


def cells_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and contents of a function's cells."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield name, cell.cell_contents
