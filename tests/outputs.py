"""`keras-conflux run`, and what may stand at the end of its output."""

import contextlib
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator


class Pipe:
    """Standard output is a pipe, of which a reader reads."""

    is_read = True
    blocks = True

    def __init__(self, folder):
        self.own, self.given = os.pipe()
        os.set_blocking(self.given, self.blocks)

    def begun(self):
        """Called when the processes are about to end."""

    def read(self):
        """Returns all that comes, once the processes have saved."""
        read = b""
        while chunk := self.chunk():
            read += chunk
        os.close(self.own)
        return read

    def chunk(self):
        return os.read(self.own, 1 << 16)


class ThatDoesNotBlock(Pipe):
    """Nor does it wait for its reader."""

    blocks = False


class Gone(Pipe):
    """Its reader is gone."""

    is_read = False

    def begun(self):
        os.close(self.own)

    def read(self):
        return b""


class Terminal(Pipe):
    """A terminal that pauses."""

    def __init__(self, folder):
        self.own, self.given = pty.openpty()

    def chunk(self):
        try:
            return super().chunk()
        except OSError:  # nobody writes any more
            return b""


class ClosedTerminal(Gone):
    """A terminal whose window is closed."""

    def __init__(self, folder):
        self.own, self.given = pty.openpty()


class Full(Gone):
    """A disk that is full."""

    def __init__(self, folder):
        self.given = os.open("/dev/full", os.O_WRONLY)

    def begun(self):
        pass


KINDS = {
    kind.__name__: kind
    for kind in (Pipe, ThatDoesNotBlock, Gone, Terminal, ClosedTerminal, Full)
}
LIVING = ("Pipe", "ThatDoesNotBlock", "Terminal", "Full")
CLOSING = ("Gone", "ClosedTerminal")

_DRAWN = re.compile(r"\r\x1b\[K[^\r\n]*(?=\r\x1b\[K)")
"""What a terminal shows for a moment."""
_PRELUDE = """
import os, signal, sys
# What a shell has started in the background hears no interrupt.
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
if os.isatty(1):
    os.login_tty(os.dup(1))
os.execv(sys.argv[1], sys.argv[1:])
"""


def shown(read: bytes) -> str:
    """Returns the lines of what was read, as they stay on a screen."""
    text = _DRAWN.sub("", read.decode(errors="replace"))
    return re.sub(r"\r\x1b\[K|\r(?=\n)|\^C", "", text)


class Launched:
    """The launcher, with an output of a kind, and somebody who may read it.

    Args:
        kind: The name of one of `KINDS`.
        arguments: Those of `keras-conflux run`.
        folder: Gets `out.log` and `err.log`. A terminal gets both.
        pause: How many seconds the reader waits before it reads on.
        environ: The environment variables.
    """

    def __init__(
        self,
        kind: str,
        arguments: list[str],
        folder: pathlib.Path,
        pause: float = 0.0,
        environ: dict[str, str] | None = None,
    ) -> None:
        self._output = KINDS[kind](folder)
        folder.mkdir(exist_ok=True)
        self._err = folder / "err.log"
        self._out = folder / "out.log"
        run = [sys.executable, "-m", "keras_conflux", "run", *arguments]
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PRELUDE, *run],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._output.given,
                stderr=err,
            )
        os.close(self._output.given)
        self._reader = threading.Thread(
            target=self._take, args=(pause,), daemon=True
        )
        if self._output.is_read:
            self._reader.start()

    def end(self, by: str) -> None:
        """Does as a user does who wants the end.

        Args:
            by: `"Ctrl-C"`, `"SIGTERM"`, or anything else. An output that can
                close does so, too.
        """
        self._output.begun()
        if by == "Ctrl-C" and isinstance(self._output, Terminal):
            os.write(self._output.own, b"\x03")
        elif by == "Ctrl-C":
            self.process.send_signal(signal.SIGINT)
        elif by == "SIGTERM":
            self.process.send_signal(signal.SIGTERM)

    def output(self) -> str | None:
        """Returns all that was read, or `None` where nobody reads."""
        if not self._output.is_read:
            return None
        self._reader.join()
        return shown(self._out.read_bytes())

    def last_line(self) -> str | None:
        """Returns what was said last, or `None` where nobody has heard it."""
        text = self._err.read_text(errors="replace")
        if isinstance(self._output, Terminal):
            text = self.output() or ""
        elif isinstance(self._output, ClosedTerminal):
            return None
        return text.rstrip("\n").rpartition("\n")[2]

    def _take(self, pause: float) -> None:
        with self._out.open("wb") as out:
            while chunk := self._output.chunk():
                out.write(chunk)
                time.sleep(pause)


@contextlib.contextmanager
def launched(*arguments, **options) -> Iterator[Launched]:
    """Starts the launcher, and ends it with the block."""
    found = Launched(*arguments, **options)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
