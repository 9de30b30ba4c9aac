"""Threads that run one call, and then wait for the next one.

Starting a thread takes as long as a step of a small model. They are daemons,
which `concurrent.futures` does not have: one whose call hangs must not keep
Python from ending.
"""

import os
import queue
import threading
from collections.abc import Callable

_idle: "list[_Daemon]" = []

# A fork has none of the threads.
os.register_at_fork(after_in_child=_idle.clear)


def run(work: Callable[[], None]) -> threading.Event:
    """Runs `work`, which must not raise, in a thread that does nothing else.

    Returns:
        What is set when it has ended.
    """
    try:
        daemon = _idle.pop()
    except IndexError:
        daemon = _Daemon()
    ended = threading.Event()
    given = [work]

    def then_be_idle() -> None:
        given.pop()()  # what it holds is dropped before another call comes
        _idle.append(daemon)
        ended.set()

    daemon.give(then_be_idle)
    return ended


class _Daemon:
    """A thread that runs one function after another."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def give(self, function: Callable[[], None]) -> None:
        self._given.put(function)

    def _work(self) -> None:
        while True:
            self._given.get()()  # without a name that would keep its batches
