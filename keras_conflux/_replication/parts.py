"""Which variables lie in parts, one on each device.

An extension knows, and cuts them. Without it, each device has copies.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

_cutting: list[Any] = []
cut_by = _cutting.append
"""Has a module of an extension cut variables, by functions of the names below.
It also tells which are `waiting`: to lie in parts, and not yet there."""


def cut(owners: Iterable[Any], strategy: Any) -> None:
    """Cuts variables, one after another, so that one at a time is whole."""
    owners = list(owners)
    for cutting in _cutting:
        for variable in cutting.waiting(owners, strategy):
            cutting.cut(variable, strategy)


def led(target: Any) -> contextlib.AbstractContextManager[None]:
    """Has the first process use whole values alone; the others then follow.

    All enter it, and only the first one uses variables of the target there.
    """
    return _cutting[-1].led(target) if _cutting else contextlib.nullcontext()


def part_size(variable: Any, count: int) -> int | None:
    """Returns how many entries each of so many devices has, if a part."""
    return _cutting[-1].part_size(variable, count) if _cutting else None


def refusal(optimizer: Any, shard: str) -> str | None:
    """Returns why an optimizer cannot update parts, `None` if it can."""
    return _cutting[-1].refusal(optimizer, shard) if _cutting else None
