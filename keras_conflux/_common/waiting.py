"""Waits for calls that may hang, up to a time limit."""

import atexit
import contextvars
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from keras_conflux._common import daemons

DEFAULT_STEP_TIMEOUT = 1800.0
"""How many seconds a step may take, unless `CONFLUX_STEP_TIMEOUT` says
otherwise."""


def step_timeout() -> float:
    """Returns how many seconds a step, or another process, is waited for."""
    return float(os.environ.get("CONFLUX_STEP_TIMEOUT", DEFAULT_STEP_TIMEOUT))


class DaemonCall:
    """Calls a function in another thread.

    So an interrupt is heard while the call is waited for, and one that hangs
    does not keep Python from ending.

    Args:
        function: What to call. It has the context variables of this thread.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: dict[str, Any] = {}

        def run() -> None:
            try:
                self._outcome["result"] = function()
            except BaseException as error:
                self._outcome["error"] = error

        context = contextvars.copy_context()
        self._ended = daemons.run(functools.partial(context.run, run))

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether the call has ended, after some seconds at most."""
        if seconds is not None:
            seconds = min(seconds, threading.TIMEOUT_MAX)
        return self._ended.wait(seconds)

    def abandon(self) -> None:
        """Says that nobody waits for it any more.

        If it still runs when Python ends, the process ends with status 1 and
        without TensorFlow's own end, which would wait for its GPUs.
        """
        _abandoned.append(self)

    def result(self) -> Any:
        """Waits for the call, and returns or raises what it has."""
        self.wait()
        if "error" in self._outcome:
            raise self._outcome["error"]
        return self._outcome["result"]


_abandoned: list[DaemonCall] = []


@atexit.register
def _end_without_waiting() -> None:
    # Of what is registered at exit, the latest comes first.
    if all(call.wait(0) for call in _abandoned):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
