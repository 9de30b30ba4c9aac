"""Processes that run together, and end together."""

import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

from keras_conflux.tools.cli.output import ENDING
from keras_conflux.tools.cli.output import Output
from keras_conflux.tools.cli.output import Screen
from keras_conflux.tools.cli.reasons import LastError

_CHILD = Path(__file__).with_name("child.py")

_NAMES = "SIGUSR1", "SIGUSR2"
TOLD = tuple(getattr(signal, x) for x in _NAMES if hasattr(signal, x))
"""Signals that are handed on, and after which processes have all their time."""

_LAST_OUTPUT_SECONDS = 1.0
"""How long to wait for the output of processes that are left behind."""
_UNTIL_SIGTERM_SECONDS = 1.0
"""How long after nobody reads: a signal that ended the reader may arrive."""
_MOST = 1 << 20
"""How many bytes a pipe holds at most."""


class Ended(NamedTuple):
    """A process has ended."""

    index: int
    """Which one."""
    status: int
    """Its exit status, or 128 and the number of the signal that ended it."""


Event = Ended | signal.Signals | str
"""A signal wants all processes to end, or tells them something. A text names a
file that nobody reads any more, such as `"standard output"`."""


class Gang:
    """Starts processes, and ends all when one fails.

    A process is the leader of a group, to which all belong that it starts.
    The whole group is gone after `run`. After a failure or a signal, and again
    after SIGTERM, the others have the seconds of grace, then SIGKILL.
    """

    def __init__(
        self,
        command: list[str],
        environments: list[dict[str, str]],
        grace_seconds: float,
        events: "queue.SimpleQueue[Event]",
        screen: Screen,
    ) -> None:
        self._command = command
        self._environments = environments
        self._grace_seconds = grace_seconds
        self._events = events
        self._screen = screen
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._running: set[int] = set()
        self._errors = [LastError() for _ in environments]
        self._failures: list[Ended] = []
        """The processes that failed before all were to end."""
        self._status = 0
        # The readers are told to leave when its other end is closed.
        self._leave, self._leave_end = os.pipe()
        self.is_interrupted = False
        """Whether someone has asked for the end."""
        self._is_asked_to_end = False
        self.heard = 0
        """How many signals of the user's have done so."""
        self._told: set[int] = set()
        # The next signals if processes go on beyond the deadline.
        self._deadline: float | None = None
        self._harsher = [signal.SIGTERM, signal.SIGKILL]

    @property
    def failed(self) -> Ended | None:
        """The first failure that no other has caused, or else the first."""
        errors = [self._errors[each.index].text for each in self._failures]
        caused = [each.startswith("ProcessError") for each in errors]
        return self._failures[caused.index(min(caused))] if caused else None

    @property
    def status(self) -> int:
        """The exit status of the first process that failed, or 0."""
        return self.failed.status if self.failed else self._status

    @property
    def error(self) -> str:
        """The error that it has raised, or nothing."""
        return self._errors[self.failed.index].text if self.failed else ""

    def run(self) -> None:
        """Starts the processes, and returns when all have ended."""
        try:
            for index, environment in enumerate(self._environments):
                self._start(index, environment)
            while self._running:
                self._await_event()
        finally:
            self._close()

    def _await_event(self) -> None:
        """Obeys the next event, or the deadline if that comes first."""
        seconds = None
        if self._deadline is not None:
            seconds = max(0.0, self._deadline - time.monotonic())
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            self._use_harsher_signal()
            return
        if isinstance(event, signal.Signals):
            self._hear(event)
        elif isinstance(event, str):
            self._end_without_reader(event)
        else:
            self._take_note(event)

    def _take_note(self, ended: Ended) -> None:
        self._running.discard(ended.index)
        if ended.status == 0:
            return
        if not self._failures and ended.status - 128 in self._told:
            self.is_interrupted = True
        elif not self._is_asked_to_end:
            self._failures.append(ended)
        self._status = self._status or ended.status
        if self._deadline is None and not self._is_asked_to_end:
            self._set_deadline(self._grace_seconds)

    def _hear(self, number: int) -> None:
        """Hands a signal on, or does not wait any longer at the second one."""
        if number in TOLD:
            self._told.add(number)
            self._send(number)
            return
        self.is_interrupted = True
        if number == signal.SIGHUP:
            # A terminal that closes may say so more than once, and also to
            # processes that already save. None of this may cut that short.
            if self._deadline is None:
                self._ask_to_end(signal.SIGTERM)
            return
        self.heard += 1
        if self.heard > 1:
            self._harsher = [signal.SIGKILL]
            self._use_harsher_signal()
        elif not self._is_asked_to_end:
            self._ask_to_end(number)

    def _end_without_reader(self, name: str) -> None:
        self.is_interrupted = True
        if self._deadline is None and not self._is_asked_to_end:
            said = f"nobody reads {name} any more, so all processes shall end"
            self._screen.say(said)
            self._set_deadline(min(_UNTIL_SIGTERM_SECONDS, self._grace_seconds))

    def _ask_to_end(self, number: int) -> None:
        self._is_asked_to_end = True
        self._send(number)
        self._set_deadline(self._grace_seconds)

    def _send(self, number: int) -> None:
        for index in self._running:
            # It has not been reaped, so the number is still its own.
            os.kill(self._processes[index].pid, number)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._screen.keep_up_to(ENDING)

    def _use_harsher_signal(self) -> None:
        number = self._harsher.pop(0)
        if self._harsher:
            self._ask_to_end(number)
        else:
            self._send(number)
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
        hear = self._errors[index].hear
        outputs = (
            (process.stdout, Output(self._screen, 1, prefix)),
            (process.stderr, Output(self._screen, 2, prefix, hear)),
        )
        for stream, output in outputs:
            reader = _thread(_read, stream, output, self._leave)
            self._readers.append(reader)
        _thread(_await, index, process.pid, self._events)

    def _close(self) -> None:
        """Ends processes that are left behind, and takes the last output."""
        # Their pipes hold little now, and all that is left to take.
        self._screen.keep_up_to(math.inf)
        deadline = time.monotonic() + _LAST_OUTPUT_SECONDS
        if not self._running:
            self._join_readers(deadline)
        for process in self._processes:
            # Not reaped, so the number still belongs to its group.
            os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._join_readers(deadline)
        os.close(self._leave_end)
        self._join_readers(math.inf)
        os.close(self._leave)

    def _join_readers(self, deadline: float) -> None:
        for reader in self._readers:
            left = max(0.0, deadline - time.monotonic())
            reader.join(None if left == math.inf else left)


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


def _read(stream: BinaryIO, output: Output, leave: int) -> None:
    """Takes the output of a process, until it ends or `leave` is closed."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    poll.register(leave, select.POLLIN)
    with stream:
        is_told = False
        while not is_told:
            ready = {descriptor for descriptor, _ in poll.poll()}
            # Whoever was left behind may write without an end.
            is_told = leave in ready
            if stream.fileno() in ready:
                chunk = stream.read(_MOST if is_told else 1 << 16)
                if not chunk:
                    break
                output.feed(chunk)
    output.close()
