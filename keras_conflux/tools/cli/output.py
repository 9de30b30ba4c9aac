"""The output of several processes, line by line, each with its number.

A carriage return begins a line anew, as progress bars do. On a terminal such a
line is drawn again in place. In a file only its last state is a line, and from
time to time one in between.
"""

import os
import re
import signal
import threading
import time

_REDRAWN_SECONDS = 10.0
"""How often a line that is drawn again and again is written to a file."""

_CLEAR = b"\r\x1b[K"
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")


class Screen:
    """What the processes write to: standard output and standard error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminals = {fd for fd in (1, 2) if os.isatty(fd)}
        self._is_drawn = False
        self._is_broken = False

    def is_terminal(self, descriptor: int) -> bool:
        """Returns whether a line can be drawn again."""
        return descriptor in self._terminals

    def write_line(self, descriptor: int, line: bytes) -> None:
        """Writes a line that does not change any more."""
        with self._lock:
            self._clear()
            self._write(descriptor, line + b"\n")

    def draw(self, descriptor: int, line: bytes) -> None:
        """Draws a line on a terminal, in place of one that was drawn."""
        width = os.get_terminal_size(descriptor).columns or 80
        # A line that the terminal breaks could not be cleared.
        text = _CONTROL.sub(b"", line).decode(errors="replace")[: width - 1]
        with self._lock:
            self._write(descriptor, _CLEAR + text.encode())
            self._is_drawn = True

    def close(self) -> None:
        """Clears what was drawn."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._is_drawn:
            self._write(min(self._terminals), _CLEAR)
            self._is_drawn = False

    def _write(self, descriptor: int, text: bytes) -> None:
        if self._is_broken:
            return
        try:
            while text:
                text = text[os.write(descriptor, text) :]
        except OSError:
            # Nobody reads any more, as in `conflux run ... | head`.
            self._is_broken = True
            os.kill(os.getpid(), signal.SIGTERM)


class Output:
    """One stream of one process.

    Args:
        screen: Where to write.
        descriptor: 1 for standard output, 2 for standard error.
        prefix: What stands before each line.
    """

    def __init__(self, screen: Screen, descriptor: int, prefix: bytes) -> None:
        self._screen = screen
        self._descriptor = descriptor
        self._prefix = prefix
        self._rest = b""
        self._next_redrawn = time.monotonic() + _REDRAWN_SECONDS

    def feed(self, chunk: bytes) -> None:
        """Takes what the process has written."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._write(line)
        self._rest = _last_state(rest)
        if not self._rest:
            return
        if self._screen.is_terminal(self._descriptor):
            text = self._prefix + _visible(self._rest)
            self._screen.draw(self._descriptor, text)
        elif b"\r" in self._rest and time.monotonic() > self._next_redrawn:
            self._write(self._rest)

    def close(self) -> None:
        """Writes a last line that has no end."""
        if self._rest:
            self._write(self._rest)
        self._rest = b""

    def _write(self, line: bytes) -> None:
        text = self._prefix + _visible(line)
        self._screen.write_line(self._descriptor, text)
        self._next_redrawn = time.monotonic() + _REDRAWN_SECONDS


def _last_state(line: bytes) -> bytes:
    """Returns a line that has no end yet, without what it has overwritten."""
    if b"\r" not in line:
        return line
    ended = b"\r" if line.endswith(b"\r") else b""
    return b"\r" + _visible(line) + ended


def _visible(line: bytes) -> bytes:
    """Returns what a terminal shows in the end: a return erases nothing."""
    states = [state for state in line.split(b"\r") if state.strip(b"\b")]
    return states[-1].replace(b"\b", b"") if states else b""
