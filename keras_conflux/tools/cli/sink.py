"""A file to which output goes, however it waits or fails.

A thread of its own writes. While a reader pauses, the output of the processes
is kept for it up to a limit, beyond which they wait, as for any reader.
"""

import errno
import os
import select
import threading
from collections.abc import Callable

RUNNING = 1 << 20
"""How many bytes are kept for a reader while the processes train."""
ENDING = 1 << 26
"""The limit once they shall end: their saving must not wait for a reader."""

_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


class Sink:
    """Writes to a file in a thread.

    Args:
        descriptor: The descriptor of the file.
        on_gone: Called once nobody reads any more.
        on_failure: Called with a message when the file begins to refuse output,
            as on a full disk.
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
                if self._has_no_reader(error):
                    self._give_up()
                elif not self._is_failing:
                    self._is_failing = True
                    self._on_failure(error)
                break

    def _has_no_reader(self, error: OSError) -> bool:
        # A terminal that was closed fails like a broken disk.
        is_hung_up = self._is_terminal and error.errno == errno.EIO
        return is_hung_up or error.errno in _GONE

    def _give_up(self) -> None:
        with self._changed:
            self._is_gone = True
            self._kept.clear()
            self._changed.notify_all()
        self._on_gone()
