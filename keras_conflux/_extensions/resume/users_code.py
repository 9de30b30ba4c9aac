"""The state of functions and objects of the user's, which nobody saves."""

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._extensions.resume import plain_values
from keras_conflux._graphs import walks

OF_KERAS = ("keras.", "keras_conflux.")
_OF_OTHERS = {"keras", "keras_conflux", "tensorflow", "numpy"}
_OF_OTHERS |= sys.stdlib_module_names
FUNCTIONS = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(types.MethodWrapperType, functools.partial),
)
WITH_VARIABLES = keras.Layer | keras.Optimizer | keras.Metric
"""Objects of Keras, whose state is in variables."""


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
        """Returns names of what is not as it was, or may not be, each once."""
        now, before = self._now(), self._marks
        changed = {key[1] for key in now if now[key] != before.get(key)}
        new, self._told = changed - self._told, changed | self._told
        return new

    def _held_by(self, holder: Any) -> list[Any]:
        held = contents(holder).values()
        others = [each for each in held if not self._is_saved(each)]
        return [each for each in others if not plain_values.is_plain(each)]

    def _now(self) -> dict[tuple[int, str], Any]:
        return {
            (i, name): self._mark(value)
            for i, holder in enumerate(self._holders)
            if not isinstance(holder, types.FunctionType) or is_of_user(holder)
            for name, value in contents(holder).items()
            if not self._is_saved(value)
        }

    def _mark(self, value: Any) -> Any:
        """Returns a mark of what a value is, `None` if it holds others."""
        if isinstance(value, tf.Tensor):
            return id(value)
        if isinstance(value, WITH_VARIABLES):
            owned = [x for x in value.variables if not self._is_saved(x)]
            return [plain_values.mark(each.numpy()) for each in owned]
        if access := plain_values.access(value):
            value = plain_values.State(access[0]())
        if plain_values.is_plain(value):
            return plain_values.mark(value)
        # Where an iterator stands, nobody can tell.
        return object() if isinstance(value, Iterator) else None


def contents(holder: Any) -> dict[str, Any]:
    """Returns what a function, a list or an object of the user's holds."""
    if isinstance(holder, functools.partial):
        listed = {str(i): each for i, each in enumerate(holder.args)}
        return {"func": holder.func} | listed | holder.keywords
    if isinstance(holder, types.FunctionType):
        code, given = holder.__code__, holder.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][-len(given) :]
        defaults = dict(zip(names, given, strict=False))
        more = vars(holder) | dict(cells_of(holder))
        return defaults | (holder.__kwdefaults__ or {}) | more
    if isinstance(holder, FUNCTIONS):
        inner = getattr(holder, "__func__", None)
        return {"self": holder.__self__, "function": inner}
    if isinstance(holder, dict | list | tuple | collections.deque):
        held = holder.values() if isinstance(holder, dict) else holder
        is_short = len(holder) < 10_000  # long ones hold data
        return {str(i): x for i, x in enumerate(held if is_short else ())}
    is_own = _is_own(type(holder)) and not isinstance(holder, WITH_VARIABLES)
    return held_by(holder) if is_own else {}


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
    return is_of_user(kind) and "-packages" not in file


def cells_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and contents of a function's cells."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield name, cell.cell_contents
