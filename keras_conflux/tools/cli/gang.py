"""Processes that run together, and end together."""

import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from typing import BinaryIO

from keras_conflux.tools.cli.output import Output
from keras_conflux.tools.cli.output import Screen

_CHILD = Path(__file__).with_name("child.py")

TOLD = tuple(
    getattr(signal, name)
    for name in ("SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Signals that are handed on, and after which processes have all their time."""

_LAST_OUTPUT_SECONDS = 1.0
"""How long to wait for output of what the processes leave behind."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process has ended."""

    index: int
    """Which one."""
    status: int
    """Its exit status, or 128 and the number of the signal that ended it."""


@dataclasses.dataclass(frozen=True)
class Signal:
    """Someone wants all processes to end, or tells them something."""

    number: int
    """The signal that does so."""


Event = Ended | Signal


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the processes have ended."""

    status: int
    """The exit status of the process that failed first, or 0."""
    failed: int | None
    """Which process that was, or `None`."""
    is_interrupted: bool
    """Whether a signal has asked for the end."""


class Gang:
    """Starts processes, and ends all when one fails.

    A process is the leader of a group, to which all belong that it starts.
    The whole group is gone after the `with` block.

    Args:
        command: What each process runs.
        environments: The environment variables of each.
        grace_seconds: How long the others may run after a failure or a
            signal, and how long again after SIGTERM. Then SIGKILL ends them.
        events: Where signals arrive.
    """

    def __init__(
        self,
        command: list[str],
        environments: list[dict[str, str]],
        grace_seconds: float,
        events: "queue.SimpleQueue[Event]",
    ) -> None:
        self._command = command
        self._environments = environments
        self._grace_seconds = grace_seconds
        self._events = events
        self._screen = Screen()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._running: set[int] = set()
        self._first_failure: Ended | None = None
        self._is_interrupted = False
        self._told: set[int] = set()
        # What comes next if processes go on beyond the deadline.
        self._deadline: float | None = None
        self._harsher = [signal.SIGTERM, signal.SIGKILL]

    def __enter__(self) -> "Gang":
        """Starts the processes."""
        try:
            for index, environment in enumerate(self._environments):
                self._start(index, environment)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends whatever still runs."""
        self._close()

    def wait(self) -> Outcome:
        """Waits until all processes have ended.

        Returns:
            How they have ended.
        """
        while self._running:
            event = self._next_event()
            if event is None:
                self._use_harsher_signal()
            elif isinstance(event, Signal):
                self._hand_on(event.number)
            else:
                self._take_note(event)
        failure = self._first_failure
        return Outcome(
            failure.status if failure else 0,
            failure.index if failure else None,
            self._is_interrupted,
        )

    def _next_event(self) -> Event | None:
        """Returns what happens next, or `None` if the deadline comes first."""
        if self._deadline is None:
            return self._events.get()
        try:
            seconds = max(0.0, self._deadline - time.monotonic())
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _take_note(self, ended: Ended) -> None:
        self._running.discard(ended.index)
        if ended.status != 0 and self._first_failure is None:
            self._first_failure = ended
            if ended.status - 128 in self._told:
                self._is_interrupted = True
            elif self._deadline is None:
                self._set_deadline()

    def _hand_on(self, number: int) -> None:
        """Hands a signal on, or does not wait any longer at the second one."""
        if number in TOLD:
            self._told.add(number)
            self._send(number)
            return
        if self._is_interrupted:
            self._harsher = [signal.SIGKILL]
            self._use_harsher_signal()
            return
        self._is_interrupted = True
        self._send(number)
        self._set_deadline()

    def _send(self, number: int) -> None:
        for index in self._running:
            # It has not been reaped, so the number is still its own.
            os.kill(self._processes[index].pid, number)

    def _set_deadline(self) -> None:
        self._deadline = time.monotonic() + self._grace_seconds

    def _use_harsher_signal(self) -> None:
        self._send(self._harsher.pop(0))
        if self._harsher:
            self._set_deadline()
        else:
            self._deadline = None
            self._harsher = [signal.SIGKILL]

    def _start(self, index: int, environment: dict[str, str]) -> None:
        # The child ends with this process, before it becomes the command.
        own = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid())]
        process = subprocess.Popen(
            [*own, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            # A terminal's Ctrl-C does not reach it but through this process.
            process_group=0,
        )
        self._processes.append(process)
        self._running.add(index)
        width = len(str(len(self._environments) - 1))
        prefix = f"[{index:>{width}}] ".encode()
        for stream, descriptor in ((process.stdout, 1), (process.stderr, 2)):
            output = Output(self._screen, descriptor, prefix)
            self._readers.append(_thread(_read, stream, output))
        _thread(_await, index, process.pid, self._events)

    def _close(self) -> None:
        deadline = time.monotonic() + _LAST_OUTPUT_SECONDS
        if not self._running:
            for reader in self._readers:
                reader.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            # Not reaped, so the number is still that of its group.
            os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self._screen.close()


def _thread(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _await(index: int, pid: int, events: "queue.SimpleQueue[Event]") -> None:
    """Tells when a process has ended, and leaves it to be reaped."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    is_exit = result.si_code == os.CLD_EXITED
    status = result.si_status if is_exit else 128 + result.si_status
    events.put(Ended(index, status))


def _read(stream: BinaryIO, output: Output) -> None:
    with stream:
        while chunk := stream.read(65536):
            output.feed(chunk)
    output.close()
