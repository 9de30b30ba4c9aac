"""Waits for calls that may hang, up to a time limit."""

import atexit
import contextvars
import functools
import gc
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any
from typing import TypeAlias

DEFAULT_STEP_TIMEOUT = 1800.0
"""How many seconds a step may take if no `CONFLUX_STEP_TIMEOUT` is set."""
_VARIABLE = "CONFLUX_STEP_TIMEOUT"


def step_timeout() -> float:
    """Returns how many seconds a step, or another process, is waited for."""
    given = os.environ.get(_VARIABLE, DEFAULT_STEP_TIMEOUT)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(
            f"The environment variable {_VARIABLE} is a number of seconds "
            f"above 0, such as 1800. Received: {given!r}"
        )
    return seconds


_Inbox: TypeAlias = "queue.SimpleQueue[Callable[[], None]]"
_idle: list[_Inbox] = []
"""Of threads that wait for a function to run."""

# A fork has none of the threads.
os.register_at_fork(after_in_child=_idle.clear)


def run_in_daemon(work: Callable[[], None]) -> threading.Event:
    """Runs `work`, which must not raise, in a thread that does nothing else.

    Starting a thread takes as long as a step of a small model, so threads are
    kept. They are daemons, which do not keep Python from ending. Returns an
    event that is set when the work has ended.
    """
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_work, args=[inbox], daemon=True).start()
    ended = threading.Event()
    given = [work]

    def then_be_idle() -> None:
        given.pop()()  # its references are dropped before another call comes
        _idle.append(inbox)
        ended.set()

    inbox.put(then_be_idle)
    return ended


def _work(inbox: _Inbox) -> None:
    while True:
        inbox.get()()  # without a name that would keep its batches


class DaemonCall:
    """Calls a function in another thread, with this one's context variables.

    So an interrupt is heard meanwhile, and one that hangs lets Python end.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: dict[str, Any] = {}

        def run() -> None:
            try:
                self._outcome["result"] = function()
            except BaseException as error:
                self._outcome["error"] = error

        context = contextvars.copy_context()
        self._ended = run_in_daemon(functools.partial(context.run, run))

    def wait(self, seconds: float = threading.TIMEOUT_MAX) -> bool:
        """Returns whether the call has ended, after some seconds at most."""
        try:
            return self._ended.wait(min(seconds, threading.TIMEOUT_MAX))
        except BaseException:  # an interrupt
            self.abandon()
            raise

    def abandon(self) -> None:
        """Marks the call as one that nobody waits for any more.

        If it still runs when Python ends, the process ends with status 1 and
        without TensorFlow's own end, which would wait for its GPUs, or abort.
        """
        _abandoned.append(self._ended)

    def result(self) -> Any:
        """Waits for the call, and returns its result or raises its error."""
        self.wait()
        if "error" in self._outcome:
            raise self._outcome["error"]
        return self._outcome["result"]


_abandoned: list[threading.Event] = []


@atexit.register
def _end_without_waiting() -> None:
    # Of the functions registered at exit, the latest runs first.
    if not all(ended.wait(1) for ended in _abandoned):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    # Iterators of TensorFlow that Python's own end deletes would wait for ever
    # for a batch that Python draws. Tracebacks and cycles hold them.
    vars(sys).update(last_exc=None, last_value=None, last_traceback=None)
    gc.collect()
