"""Lines for the user, and the switch that silences all of them."""

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator

from keras_conflux._common.errors import ConfluxWarning

VARIABLE = "CONFLUX_QUIET"
"""An environment variable, which is 1 to print neither lines nor warnings."""

SLOW = 5.0
"""After how many seconds the user is told that something takes long."""

_log = logging.getLogger("keras_conflux")


def obey_environment() -> None:
    """Silences the package, if the environment asks for it."""
    if os.environ.get(VARIABLE) == "1":
        _log.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=ConfluxWarning)


def tell(text: str) -> None:
    """Tells the user something that is no warning.

    It goes into the log of a program that logs at INFO, and else to stderr.
    """
    line = f"keras-conflux: {text}"
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info(line)
    elif max(_log.level, _log.manager.disable) <= logging.INFO:
        # The line of a terminal may hold Keras' progress bar.
        begin = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(begin + line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def told_if_slow(text: str) -> Iterator[None]:
    """Tells the user something if the code inside takes long."""
    timer = threading.Timer(SLOW, tell, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
