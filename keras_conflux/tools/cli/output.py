"""The output of several processes, line by line, each with its number.

A carriage return begins a line anew, as progress bars do. Only the last state
of such a line is written, and from time to time one in between.
"""

import errno
import functools
import os
import select
import threading
import time
from collections.abc import Callable

RUNNING = 1 << 20
"""How many bytes are kept for a reader while the processes train."""
ENDING = 1 << 26
"""The limit once they shall end: their saving must not wait for a reader."""

_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
_REDRAWN_SECONDS = 10.0
"""How often a line that is drawn again and again is written."""
_LONG = 1 << 16
"""The bytes from which on a line is broken."""

_NAMES = {1: "standard output", 2: "standard error"}


class Sink:
    """A file to which output goes, however it waits or fails.

    A thread of its own writes. While a reader pauses, the output of the
    processes is kept for it up to a limit, beyond which they wait.

    It tells once nobody reads any more, or the file refuses output, as if full.
    """

    def __init__(
        self,
        descriptor: int,
        on_gone: Callable[[], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._descriptor = descriptor
        self._is_terminal = os.isatty(descriptor)
        self._on_gone = on_gone
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._kept = bytearray()
        self._in_hand = 0
        self._limit: float = RUNNING
        self._is_closed = False
        self._is_gone = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def wait_for_room(self) -> None:
        """Waits while a reader has too much to read already."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._in_hand + len(self._kept) < self._limit
            )

    def put(self, data: bytes) -> None:
        """Has data written. This does not wait."""
        with self._changed:
            if not self._is_gone:
                self._kept += data
                self._changed.notify_all()

    def keep_up_to(self, limit: float) -> None:
        """Sets how many bytes are kept for a reader."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def close(self) -> None:
        """Has the thread end when all is written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Waits for the thread, and returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write_all(self) -> None:
        while data := self._next():
            self._write(data)

    def _next(self) -> bytes:
        """Returns the next bytes to write, none at the end."""
        with self._changed:
            self._in_hand = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._kept or self._is_closed)
            data = bytes(self._kept)
            self._kept.clear()
            self._in_hand = len(data)
            return data

    def _write(self, data: bytes) -> None:
        """Writes all that can be written, and drops the rest."""
        rest = memoryview(data)
        while rest and not self._is_gone:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
                self._is_failing = False
            except BlockingIOError:
                # Someone has set the file not to wait for its reader.
                select.select([], [self._descriptor], [])
            except OSError as error:
                # A terminal that was closed fails like a broken disk.
                is_hung_up = self._is_terminal and error.errno == errno.EIO
                if is_hung_up or error.errno in _GONE:
                    self._give_up()
                elif not self._is_failing:
                    self._is_failing = True
                    self._on_failure(error)
                break

    def _give_up(self) -> None:
        with self._changed:
            self._is_gone = True
            self._kept.clear()
            self._changed.notify_all()
        self._on_gone()


class Screen:
    """Standard output and error; tells the name of one that nobody reads."""

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._files: dict[int, Sink] = {}
        for descriptor, name in _NAMES.items():
            self._files[descriptor] = self._same(descriptor) or Sink(
                descriptor,
                functools.partial(on_gone, name),
                functools.partial(self._tell_of_failure, descriptor),
            )

    def write(self, descriptor: int, line: bytes) -> None:
        """Writes a line, once its reader has room for it."""
        file = self._files[descriptor]
        file.wait_for_room()
        file.put(line + b"\n")

    def say(self, text: str, descriptor: int = 2) -> None:
        """Writes a line of the launcher's own. This does not wait."""
        line = f"keras-conflux run: {text}\n"
        self._files[descriptor].put(line.encode(errors="replace"))

    def keep_up_to(self, limit: float) -> None:
        """Sets how many bytes are kept for a reader that pauses."""
        for file in self._files.values():
            file.keep_up_to(limit)

    def close(self) -> None:
        """Has all be written. Nothing is written afterwards."""
        for file in self._files.values():
            file.close()

    def join(self, seconds: float) -> bool:
        """Waits until all is written or nobody reads; returns whether it is."""
        end = time.monotonic() + seconds
        return all(
            file.join(max(0.0, end - time.monotonic()))
            for file in self._files.values()
        )

    def _same(self, descriptor: int) -> Sink | None:
        """Returns the file to which an earlier descriptor goes as well."""
        for other, file in self._files.items():
            try:
                if os.path.sameopenfile(descriptor, other):
                    return file
            except OSError:  # one is closed
                continue
        return None

    def _tell_of_failure(self, descriptor: int, error: OSError) -> None:
        (other,) = _NAMES.keys() - {descriptor}
        if self._files[other] is not self._files[descriptor]:
            self.say(
                f"{_NAMES[descriptor]} cannot be written: {error}; the "
                "processes go on, and their output is dropped until it can",
                other,
            )


class Output:
    """A stream of a process, on a screen. `hear` gets each line unprefixed."""

    def __init__(
        self,
        screen: Screen,
        descriptor: int,
        prefix: bytes,
        hear: Callable[[bytes], None] = lambda line: None,
    ) -> None:
        self._descriptor = descriptor
        self._prefix = prefix
        self._screen = screen
        self._hear = hear
        self._rest = b""
        self._is_broken = False
        self._next_redrawn = time.monotonic() + _REDRAWN_SECONDS

    def feed(self, chunk: bytes) -> None:
        """Takes output of the process."""
        if self._is_broken:
            chunk = chunk.removeprefix(b"\n")
        self._is_broken = False
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._write(line)
        self._rest = _last_state(rest)
        if len(self._rest) > _LONG:
            self.close()
            self._is_broken = True
        elif b"\r" in self._rest and time.monotonic() > self._next_redrawn:
            self._write(self._rest)

    def close(self) -> None:
        """Ends a line that has no end."""
        if self._rest:
            self._write(self._rest)
        self._rest = b""

    def _write(self, line: bytes) -> None:
        text = _visible(line)
        self._screen.write(self._descriptor, self._prefix + text)
        self._hear(text)
        self._next_redrawn = time.monotonic() + _REDRAWN_SECONDS


def _last_state(line: bytes) -> bytes:
    """Returns a line that has no end yet, without its overwritten parts."""
    if b"\r" not in line:
        return line
    ended = b"\r" if line.endswith(b"\r") else b""
    return b"\r" + _visible(line) + ended


def _visible(line: bytes) -> bytes:
    """Returns the line as a terminal shows it: a return erases nothing."""
    states = [state for state in line.split(b"\r") if state.strip(b"\b")]
    return states[-1].replace(b"\b", b"") if states else b""
