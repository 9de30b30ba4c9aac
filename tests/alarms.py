"""Ends what takes too long, by a signal, in the main thread."""

import contextlib
import signal


@contextlib.contextmanager
def limited(seconds, error=TimeoutError):
    """Raises an error in its block after some seconds.

    Args:
        seconds: How many, a whole number.
        error: The class of the error.
    """

    def stop(number, frame):
        raise error(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
