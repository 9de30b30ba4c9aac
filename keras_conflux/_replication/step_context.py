"""What the program that a replica runs leaves to the package."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Program:
    """A replica's program while it is traced."""

    name: str
    """What a warning calls it."""
    warned: set[str] = dataclasses.field(default_factory=set)
    """What has been warned of, in this program on any replica."""
    share: Any = None
    """In a step of `fit`, a scalar: this replica's part of the global batch.
    All parts add up to one. `None` in `withdevices`, where the user reduces."""
    graph: Any = None
    """In a step of `fit`, the graph that it is traced to, if it is."""
    reduced: list[Any] = dataclasses.field(default_factory=list)
    """The leaves that the user's `allreduce` returned."""
    assigned: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, the Keras variables that a step of `fit` has written."""
    before: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, what a variable was before a step of `fit` first added to it."""
    averages: list[Any] = dataclasses.field(default_factory=list)
    """The Keras variables that are to be averaged after the last step."""
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    """By the names under which a step returns them, the metrics."""
    weighted: set[int] = dataclasses.field(default_factory=set)
    """The ids of the optimizers whose loss was multiplied by the share."""


_running = threading.local()


def current() -> Program | None:
    """Returns the program of this replica, if the package runs it."""
    return getattr(_running, "program", None)


def current_step() -> Program | None:
    """Returns the program of this replica if it is a step of `fit`."""
    program = current()
    return program if program and program.share is not None else None


@contextlib.contextmanager
def running(program: Program | None) -> Iterator[None]:
    """Makes `program` the current one of this replica's thread."""
    before = current()
    _running.program = program
    try:
        yield
    finally:
        _running.program = before
