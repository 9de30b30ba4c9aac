"""Lines for the user, and the switch that silences all of them."""

import logging
import os
import sys
import warnings

from keras_conflux._common.errors import ConfluxWarning

VARIABLE = "CONFLUX_QUIET"
"""An environment variable, which is 1 to print neither lines nor warnings."""

_log = logging.getLogger("keras_conflux")


def obey_environment() -> None:
    """Silences the package, if the environment asks for it."""
    if os.environ.get(VARIABLE) == "1":
        _log.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=ConfluxWarning)


def tell(text: str) -> None:
    """Tells the user something that is no warning.

    It goes into the log of a program that logs at INFO, and else to stderr,
    unless the program has set another level for this package.

    Args:
        text: A line, without its end.
    """
    line = f"keras-conflux: {text}"
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info(line)
    elif max(_log.level, _log.manager.disable) <= logging.INFO:
        print(line, file=sys.stderr, flush=True)
