"""Names inside of Keras and TensorFlow, and whether they are as expected."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import types
from typing import Any


@dataclasses.dataclass(frozen=True)
class ListedName:
    """Something of a library that the package relies on."""

    path: str
    """The path for `pkgutil.resolve_name`: `"module:Class.method"`. The class
    may inherit the method."""
    parameters: str | None = None
    """The names of a function's parameters, with commas, or `None` for any."""
    mentions: str = ""
    """The attributes that the code of a function or class defines, reads or
    sets, by which objects are known to have them."""
    since: tuple[int, int] | None = None
    """The first version of the library that has it, if not all have."""

    def is_in(self, version: tuple[int, ...]) -> bool:
        """Whether a version of the library, as numbers, is to have it."""
        return self.since is None or version >= self.since

    @property
    def library(self) -> str:
        """`"keras"` or `"tensorflow"`."""
        return re.split("[:.]", self.path)[0]

    @property
    def owner(self) -> Any:
        """The module that has it, or the class that defines it."""
        module, _, inside = self.path.partition(":")
        found = pkgutil.resolve_name(f"{module}:{inside.rpartition('.')[0]}")
        classes = found.__mro__ if isinstance(found, type) else ()
        return next((x for x in classes if self.attribute in vars(x)), found)

    @property
    def attribute(self) -> str:
        """Its name in the owner."""
        return re.split("[:.]", self.path)[-1]


class Public(ListedName):
    """A name that a library documents, with its parameters."""


class Private(ListedName):
    """A name that a library may change, or a class with such attributes."""


def module_if_any(name: str) -> Any:
    """Returns a module for an extension, empty if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)


def problem(name: ListedName) -> str | None:
    """Returns a phrase if a name is missing or has changed."""
    path = f"`{name.path}`"
    try:
        found = pkgutil.resolve_name(name.path)
    except (ImportError, AttributeError):
        return f"{path} is missing"
    if name.parameters is not None:
        parameters = ", ".join(inspect.signature(found).parameters)
        if parameters != name.parameters:
            return f"{path} takes ({parameters}), not ({name.parameters})"
    if not name.mentions:
        return None
    known = _mentioned(found)
    missing = [m for m in name.mentions.split(", ") if m not in known]
    return f"{path} does not use `{'`, `'.join(missing)}`" if missing else None


def _mentioned(whole: Any) -> set[str]:
    """Returns the names and strings in the code of a function or a class."""
    members, found = [whole], set[str]()
    if isinstance(whole, type):
        found = {*dir(whole)}
        members = [x for each in whole.__mro__ for x in vars(each).values()]
    functions = [inspect.unwrap(getattr(x, "fget", x)) for x in members]
    waiting = [x.__code__ for x in functions if hasattr(x, "__code__")]
    while waiting:
        code = waiting.pop()
        found |= {*code.co_names, *code.co_varnames}
        found |= {each for each in code.co_consts if isinstance(each, str)}
        waiting += [each for each in code.co_consts if inspect.iscode(each)]
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: `(3, 15, 1)` of `"3.15.1"`."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:3])
