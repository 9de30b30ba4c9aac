"""Which variables lie in parts, one on each device.

An extension knows, and cuts them. Without it, each device has copies.
"""

from collections.abc import Iterable
from typing import Any
from typing import Protocol

import keras


class Cutting(Protocol):
    """Cuts the variables that a strategy says to keep in parts."""

    def waiting(
        self, owners: Iterable[Any], strategy: Any
    ) -> list[keras.Variable]:
        """Returns the variables that are to lie in parts and do not yet."""
        ...

    def cut(self, variable: keras.Variable, strategy: Any) -> None:
        """Gives each device its part of a variable, and frees the whole."""
        ...

    def part_size(self, variable: Any, count: int) -> int | None:
        """Returns how many entries each of so many devices has, if a part."""
        ...

    def refusal(self, optimizer: Any, shard: str) -> str | None:
        """Returns why an optimizer cannot update parts, `None` if it can."""
        ...


_cutting: list[Cutting] = []
cut_by = _cutting.append
"""Has an extension cut variables."""


def cut(owners: Iterable[Any], strategy: Any) -> None:
    """Cuts variables, one after another, so that one at a time is whole."""
    owners = list(owners)
    for cutting in _cutting:
        for variable in cutting.waiting(owners, strategy):
            cutting.cut(variable, strategy)


def part_size(variable: Any, count: int) -> int | None:
    """See `Cutting`. It is `None` if the variable stays whole."""
    return _cutting[-1].part_size(variable, count) if _cutting else None


def refusal(optimizer: Any, shard: str) -> str | None:
    """See `Cutting`."""
    return _cutting[-1].refusal(optimizer, shard) if _cutting else None
