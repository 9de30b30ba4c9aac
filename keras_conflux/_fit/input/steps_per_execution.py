"""How many batches can be there when the devices have run those before.

A call takes some milliseconds however many steps it has, so long ones are
better; but their batches take longer to be drawn and moved than a shorter call
runs. So a call gets what can be there in time, and what is drawn beyond that
waits for the next one, which can then be longer.
"""

import math
import time

_LATE = 0.1
"""The part of a call's time that devices may wait, for a longer call next."""
_MOST_ALIKE = 3
"""After so many calls of one length the next is longer even if devices wait.
They would otherwise stay short where batches come as fast as steps."""


class Window:
    """The time in which a call runs, and the batches of the next are moved.

    Args:
        steps: How many steps the running call has.
        least: How many the next one has at least.
        seconds: How long the running one will last.
        moving: How many seconds a batch takes to be moved.
    """

    def __init__(
        self, steps: int, least: int, seconds: float, moving: float
    ) -> None:
        self._steps = steps
        self._least = least
        self._moving = moving
        self._end = time.monotonic() + seconds
        self._late = self._end + _LATE * seconds

    def is_over(self, drawn: int) -> bool:
        """Whether what is drawn must be moved now, and no more be drawn."""
        if drawn < self._least:
            return False
        longer = drawn >= 2 * self._steps
        return not self.can_move(
            power_of_two(drawn + 1) if longer else self._steps
        )

    def fitting(self, drawn: int) -> int:
        """Returns how many of the batches that are drawn to move now."""
        count = power_of_two(drawn)
        while count > self._least and not self.can_move(count):
            count //= 2
        return count

    def can_move(self, count: int) -> bool:
        """Whether so many batches can be there in time."""
        end = self._late if count > self._steps else self._end
        return time.monotonic() + count * self._moving <= end


ENDLESS = Window(steps=1, least=1, seconds=math.inf, moving=0.0)
"""For batches that are waited for in any case."""


class Pace:
    """What steps and moves have taken, by which windows are reckoned."""

    def __init__(self) -> None:
        self._step_seconds = math.inf
        self._move_seconds = math.inf
        self._steps = 0
        self._alike = 0

    def note_call(self, steps: int, seconds: float) -> None:
        """Takes down how long a call was."""
        self._step_seconds = seconds / steps

    def note_move(self, batches: int, seconds: float) -> None:
        """Takes down what moving took while a call ran.

        It may wait for the step that runs, so the least a batch counts.
        """
        if batches:
            self._move_seconds = min(self._move_seconds, seconds / batches)

    def window(self, steps: int) -> Window:
        """Returns the window of a call that begins now."""
        self._alike = self._alike + 1 if steps <= self._steps else 1
        self._steps = steps
        known = math.isfinite(self._move_seconds)
        return Window(
            steps,
            2 * steps if self._alike >= _MOST_ALIKE else steps,
            steps * self._step_seconds,
            self._move_seconds if known else 0.0,
        )


def power_of_two(most: int) -> int:
    """The largest that is not above `most`, and at least 1.

    How many batches are stacked is traced for, so it takes few values.
    """
    return 1 << max(0, most.bit_length() - 1)
