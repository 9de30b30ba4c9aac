"""When the next checkpoint is due."""

import re
import time

_UNITS = {"s": 1, "m": 60, "h": 3600}


class SavingInterval:
    """Counts steps, or looks at the clock.

    Args:
        every: A number of steps, or a time such as `"10m"`.

    Raises:
        ValueError: If it is neither.
    """

    def __init__(self, every: int | str) -> None:
        self._steps: float = float("inf")
        self._seconds: float = float("inf")
        matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(every))
        if matched:
            self._seconds = float(matched[1]) * _UNITS[matched[2]]
        elif type(every) is int and every > 0:
            self._steps = every
        else:
            raise ValueError(
                "`every` is a number of steps of at least 1, or a time such as "
                f'"30s", "10m" or "2h". Received: every={every!r}'
            )
        self.restart(0)

    def restart(self, step: int) -> None:
        """Counts from here.

        Args:
            step: The number of steps done, in all epochs.
        """
        self._since = step
        self._began = time.monotonic()

    def is_over(self, step: int) -> bool:
        """Whether a checkpoint is due."""
        return (
            step - self._since >= self._steps
            or time.monotonic() - self._began >= self._seconds
        )
