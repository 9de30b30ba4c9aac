"""The table of checks: programs, and where strategies are to differ."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple


class Check(NamedTuple):
    """A program that runs on a stock strategy and on ours.

    Attributes:
        run: The program. It takes a strategy, and returns a tree of values.
        raises: The class of the error that the program raises.
        differs: Why the result here is another one on purpose.
        here: The result here, if it differs: a tree, or a class of an error.
        fails: Why the result here is a wrong one today.
    """

    run: Callable[[Any], Any]
    raises: type[Exception] | None = None
    differs: str | None = None
    here: Any = None
    fails: str | None = None


CHECKS: dict[str, Check] = {}
MEETING = "replicas meet inside of conditions and functions"


def check(name: str | None = None, **options: Any) -> Callable:
    """Writes a program into the table, by its own name or by another."""

    def add(program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        row = name or program.__name__
        assert row not in CHECKS, row
        CHECKS[row] = Check(program, **options)
        return program

    return add
