"""Measurements of the loop of `fit`: its waits, and its executions."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from collections.abc import Iterator

clock = time.perf_counter


@dataclasses.dataclass
class Work:
    """Some executions, added up."""

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    """The samples of the global batches."""


@dataclasses.dataclass
class Measurements:
    """The sums of an epoch so far.

    Whoever reads them calls `reset` where an epoch begins. Without a reader
    they are the sums of the whole call. `in_call` is not reset.
    """

    waited: float = 0.0
    """The seconds that the loop has waited for batches."""
    first: Work = dataclasses.field(default_factory=Work)
    """Executions that have traced or compiled a program."""
    other: Work = dataclasses.field(default_factory=Work)

    def __post_init__(self) -> None:
        self._waited_before = self._busy_before = 0.0

    @property
    def waited_in_call(self) -> float:
        """How many seconds the loop has waited in all epochs."""
        return self._waited_before + self.waited

    @property
    def busy_in_call(self) -> float:
        """How many seconds the executions of all epochs but `first` took."""
        return self._busy_before + self.other.seconds

    def reset(self) -> None:
        """Begins anew."""
        self._waited_before += self.waited
        self._busy_before += self.other.seconds
        self.waited, self.first, self.other = 0.0, Work(), Work()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures how long the loop waits for batches."""
        began = clock()
        try:
            yield
        finally:
            self.waited += clock() - began

    @contextlib.contextmanager
    def executing(
        self, steps: int, samples: int, programs: Callable[[], int]
    ) -> Iterator[None]:
        """Measures an execution."""
        before, began = programs(), clock()
        yield
        work = self.first if programs() > before else self.other
        work.seconds += clock() - began
        work.steps += steps
        work.samples += samples
