"""How many batches can be there when the devices have run those before.

A call takes some milliseconds however many steps it has, so long ones are
better; but their batches take longer to be drawn and moved than a shorter call
runs. So a call gets what can be there in time, and what is drawn beyond that
waits for the next one, which can then be longer.
"""

import time

_LATE = 0.1
"""The part of a call's time that devices may wait, for a longer call next."""


class Window:
    """The time in which a call runs, and the batches of the next are moved.

    Args:
        steps: How many steps the running call has.
        seconds: How long it will last.
        moving: How many seconds a batch takes to be moved.
    """

    def __init__(self, steps: int, seconds: float, moving: float) -> None:
        self._steps = steps
        self._moving = moving
        self._end = time.monotonic() + seconds
        self._late = self._end + _LATE * seconds

    def is_over(self, drawn: int) -> bool:
        """Whether what is drawn must be moved now, and no more be drawn."""
        if drawn >= 2 * self._steps:
            return not self.can_move(power_of_two(drawn + 1))
        return not self.can_move(min(self._steps, power_of_two(drawn)))

    def fitting(self, drawn: int) -> int:
        """Returns how many of the batches that are drawn to move now."""
        count = power_of_two(drawn)
        while count > self._steps and not self.can_move(count):
            count //= 2
        return count

    def can_move(self, count: int) -> bool:
        """Whether so many batches can be there in time."""
        end = self._late if count > self._steps else self._end
        return time.monotonic() + count * self._moving <= end


def power_of_two(most: int) -> int:
    """The largest that is not above `most`, and at least 1.

    How many batches are stacked is traced for, so it takes few values.
    """
    return 1 << max(0, most.bit_length() - 1)
