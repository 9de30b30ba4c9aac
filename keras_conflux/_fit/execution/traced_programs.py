"""The programs of a step, by what each was traced for."""

import threading
from collections.abc import Callable
from collections.abc import Hashable
from typing import Generic
from typing import Protocol
from typing import TypeVar


class _MayBeStale(Protocol):
    def is_stale(self) -> bool: ...


_Program = TypeVar("_Program", bound=_MayBeStale)


class TracedPrograms(Generic[_Program]):
    """Keeps programs until the variables that they read are replaced.

    Args:
        tracing: Held while a program is traced.
    """

    def __init__(self, tracing: threading.RLock) -> None:
        self._tracing = tracing
        self._programs: dict[Hashable, _Program] = {}
        self.count = 0
        """How many have been traced."""

    def get(self, key: Hashable, trace: Callable[[], _Program]) -> _Program:
        """Returns the program of a key.

        Args:
            key: What it is traced for.
            trace: Makes it, if there is none or it is stale.
        """
        with self._tracing:
            program = self._programs.get(key)
            if program is None or program.is_stale():
                program = self._programs[key] = trace()
                self.count += 1
            return program
