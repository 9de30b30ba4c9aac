"""Who makes the programs that XLA compiles.

By default they are traced and called. `make_by` puts somebody else in place.
"""

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Protocol

from keras_conflux._fit.execution.traced_program import TracedProgram
from keras_conflux._fit.execution.watchdog import StepWatchdog


class Program(Protocol):
    """A program of all replicas."""

    def is_stale(self) -> bool:
        """Whether it reads variables that have been replaced since."""
        ...

    def __call__(self, *arguments: Any) -> Any:
        """Returns what the program returns, or raises what it raises."""
        ...


@dataclasses.dataclass(frozen=True)
class Purpose:
    """What a program is for."""

    identity: str
    """What is the same whenever the same program is traced."""
    kind: str
    """The kind of the devices that it runs on."""
    watchdog: StepWatchdog
    """Knows which replicas have ended, and the name of the program."""
    is_alone: bool
    """Whether no other process takes part."""


Maker = Callable[[Callable[[], TracedProgram], Purpose], Program]


def _traced(trace: Callable[[], TracedProgram], purpose: Purpose) -> Program:
    del purpose
    return trace()


_makers: list[Maker] = [_traced]


def make_by(maker: Maker) -> None:
    """Has another function make the programs from now on."""
    _makers.append(maker)


def make(trace: Callable[[], TracedProgram], purpose: Purpose) -> Program:
    """Makes a program.

    Args:
        trace: Traces it.
        purpose: What it is for.
    """
    return _makers[-1](trace, purpose)
