"""Names inside of Keras and TensorFlow, and whether they are as expected."""

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """Something inside of a library that the package relies on."""

    path: str
    """The path for `pkgutil.resolve_name`: `"module:Class.method"`."""
    parameters: str | None = None
    """The names of a function's parameters, separated by commas; `None` where
    they do not matter."""
    mentions: tuple[str, ...] = ()
    """The attributes that a function's code reads or sets, by which objects
    are known to have them."""
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
        """The class or module that has it."""
        module, _, inside = self.path.partition(":")
        return pkgutil.resolve_name(f"{module}:{inside.rpartition('.')[0]}")

    @property
    def attribute(self) -> str:
        """Its name in the owner."""
        return re.split("[:.]", self.path)[-1]


def problems(names: Iterable[PrivateName], version: tuple) -> list[str]:
    """Returns a phrase for each name that is missing or has changed.

    Args:
        names: The expected names.
        version: The library's version, as numbers.
    """
    return [
        f"`{name.path}` {problem}"
        for name in names
        if name.is_in(version)
        if (problem := _problem(name)) is not None
    ]


def _problem(name: PrivateName) -> str | None:
    try:
        found = pkgutil.resolve_name(name.path)
    except (ImportError, AttributeError):
        return "is missing"
    if name.parameters is not None:
        parameters = ", ".join(inspect.signature(found).parameters)
        if parameters != name.parameters:
            return f"takes ({parameters}), not ({name.parameters})"
    missing = [m for m in name.mentions if m not in _mentioned(found)]
    return f"does not use `{'`, `'.join(missing)}`" if missing else None


def _mentioned(function: Any) -> set[str]:
    """Returns the names and strings in a function's code, nested ones too."""
    function = inspect.unwrap(getattr(function, "fget", function))
    waiting = [function.__code__]
    found: set[str] = set()
    while waiting:
        code = waiting.pop()
        found |= {*code.co_names, *code.co_varnames}
        found |= {each for each in code.co_consts if isinstance(each, str)}
        waiting += [each for each in code.co_consts if inspect.iscode(each)]
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: `(3, 15, 1)` of `"3.15.1"`."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:3])
