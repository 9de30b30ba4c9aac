"""Who may call at the port of process 0, and is none of the processes."""

import contextlib
import socket
import threading
import time


def _dawdle(other):
    with contextlib.suppress(OSError):
        while True:
            other.sendall(b"x")
            time.sleep(0.05)


STRANGERS = {
    "who is silent": lambda other: None,
    "who is gone": lambda other: other.close(),
    "who asks for a page": lambda other: other.sendall(b"GET / HTTP/1.1\r\n"),
    "who dawdles": _dawdle,
    "who opens brackets": lambda other: other.sendall(b"[" * 999 + b"\n"),
    "who has digits": lambda other: other.sendall(b"9" * 500 + b" 3\n"),
    "who has no end": lambda other: other.sendall(b"\xff" * 10**6),
    "who guesses": lambda other: other.sendall(b"0" * 64 + b" 1 3\n"),
    "who lies": lambda other: other.sendall(b"0" * 64 + b" 1 2\n"),
    "who is of a former version": lambda other: other.sendall(b"[1, 3]\n"),
}


@contextlib.contextmanager
def strangers(port, seconds=5):
    """Has all kinds of strangers at a port, many of each."""
    with contextlib.ExitStack() as stack:
        for act in 5 * [*STRANGERS.values()]:
            other = stack.enter_context(connected(port, seconds))
            threading.Thread(
                target=_tried, args=(act, other), daemon=True
            ).start()
        yield


def _tried(act, other):
    with contextlib.suppress(OSError):
        act(other)


def connected(port, seconds=30):
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("localhost", port), 1)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
