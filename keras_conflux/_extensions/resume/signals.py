"""Signals by which a machine says that it is about to be taken away.

Forked children hear none of them: they give up what they take of a training.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from types import FrameType
from typing import Any

from keras_conflux._common.user_warnings import warn

_NOT_TOLD = {"SIGKILL", "SIGSTOP"}
"""Signals of which a program is not told."""
_taken: list[Callable[[], None]] = []


class Preemption:
    """Notes a signal of these names, to be obeyed when a step has ended."""

    def __init__(self, names: tuple[str, ...]) -> None:
        given: Any = names
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(
                '`signals` is a tuple of names, such as ("SIGTERM",), or (). '
                f"Received: {names!r}"
            )
        known = {each.name for each in signal.Signals} - _NOT_TOLD
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                "`signals` are names of signals of this operating system that "
                f'a program can hear, such as "SIGTERM". Received: {unknown}'
            )
        self._numbers = [signal.Signals[name] for name in names]
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        self.received: int | None = None
        """The number of the signal that came."""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes signals that come; sends one again that nobody has obeyed."""
        heard = self._numbers
        if heard and threading.current_thread() is not threading.main_thread():
            heard = []
            warn(
                "`fit` runs in a thread, and Python tells of signals in the "
                "main thread only: on SIGTERM this training ends without a "
                "last checkpoint. Call `fit` in the main thread, or pass "
                "`signals=()` to `Resume`."
            )
        before = {
            number: signal.signal(number, self._note_signal)
            for number in heard
            # `nohup` has said that this one shall not be heard.
            if number != signal.SIGHUP
            or signal.getsignal(number) is not signal.SIG_IGN
        }

        def put_back() -> None:
            for number, handler in before.items():
                if handler is not None:  # it was installed outside of Python
                    signal.signal(number, handler)

        with until_forked(put_back):
            yield
        if self.received is not None:
            signal.raise_signal(self.received)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        silence_closed(self._terminals)


def silence_closed(terminals: list[int]) -> None:
    """Sends what is written to closed terminals nowhere."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextlib.contextmanager
def until_forked(undo: Callable[[], None]) -> Iterator[None]:
    """Undoes at its end, and in each forked child, what a training has."""
    _taken.append(undo)
    try:
        yield
    finally:
        undo()
        if undo in _taken:  # not in a child that comes out of this, too
            _taken.remove(undo)


def _give_up() -> None:
    while _taken:
        _taken.pop()()


os.register_at_fork(after_in_child=_give_up)
