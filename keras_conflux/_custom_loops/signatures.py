"""The types of a function that runs on every device.

It keeps its parameters, except that each of them also takes a `Replicas`.
Python has no such `ParamSpec`. So a call whose first or second
positional argument is a `Replicas` is accepted with any others, and all other
calls are checked as calls of the plain function are.
"""

from collections.abc import Callable
from typing import Any
from typing import Concatenate
from typing import ParamSpec
from typing import Protocol
from typing import TypeVar
from typing import overload

from keras_conflux._replication.replicas import Replicas

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_Instance = TypeVar("_Instance", contravariant=True)
_Others = ParamSpec("_Others")


class PerDeviceCall(Protocol[P, R_co]):
    """A function of parameters `P` as it can be called."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self, first: Replicas[Any], /, *args: Any, **kwargs: Any
    ) -> R_co: ...
    @overload
    def __call__(
        self, first: Any, second: Replicas[Any], /, *args: Any, **kwargs: Any
    ) -> R_co: ...


class PerDeviceFunction(PerDeviceCall[P, R_co], Protocol[P, R_co]):
    """A function of parameters `P`, or a method, that runs on every device."""

    def __get__(
        self: "PerDeviceFunction[Concatenate[_Instance, _Others], R_co]",
        instance: _Instance,
        owner: Any = None,
    ) -> "PerDeviceFunction[_Others, R_co]": ...


class Decorator(Protocol):
    """The decorator that `withdevices` returns if it is given options only."""

    def __call__(
        self, fn: Callable[P, R], /
    ) -> PerDeviceFunction[P, Replicas[R]]: ...
