"""Decides how many steps the next execution runs.

Starting one costs some milliseconds, so long ones are more efficient. But its
batches must be on the devices before the execution before it ends.
"""

import math
import time
from typing import Any

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.processes import process_count
from keras_conflux._fit.input.host_to_device import power_of_two
from keras_conflux._fit.input.host_to_device import size_in_bytes

MAX_STEPS_PER_EXECUTION = 256
"""The maximum number of steps of an execution that the package chooses."""
MAX_EXECUTION_SECONDS = 4.0
"""The maximum duration of an execution, after which an interrupt is heard."""
INPUT_MEMORY_FRACTION = 1 / 32
"""The largest fraction of a device's memory for batches of an execution."""
EFFICIENT_STEPS = 16
"""The number of steps whose batches may take as much; others get a quarter."""

_MAX_GROWTH = 4
"""The next execution has at most so many times the steps of the one before."""
_MAX_STALL_FRACTION = 0.1
"""The fraction of an execution's time that devices may wait for batches."""
_MAX_EQUAL_EXECUTIONS = 3
"""After so many executions of one length the next is longer even if devices
wait: it would stay short where a batch takes as long to arrive as a step."""


class PrefetchBudget:
    """The time of an execution, in which the batches of the next must arrive.

    It takes the numbers of steps of the running one and, at least, of the next
    one, and estimates for the running one and for the move of a batch.
    """

    def __init__(
        self, steps: int, minimum: int, seconds: float, move_seconds: float
    ) -> None:
        self._steps = steps
        self._minimum = minimum
        self._move_seconds = move_seconds
        self._end = time.monotonic() + seconds
        self._late = self._end + _MAX_STALL_FRACTION * seconds

    def is_spent(self, drawn: int) -> bool:
        """Whether drawn batches must be moved now, and no more be drawn."""
        if drawn < self._minimum:
            return False
        longer = drawn >= 2 * self._steps
        count = power_of_two(drawn + 1) if longer else self._steps
        return not self.can_move(count)

    def fitting(self, drawn: int) -> int:
        """Returns how many of the batches that are drawn to move now."""
        count = power_of_two(drawn)
        while count > self._minimum and not self.can_move(count):
            count //= 2
        return count

    def can_move(self, count: int) -> bool:
        """Whether so many batches can arrive in time."""
        end = self._late if count > self._steps else self._end
        return time.monotonic() + count * self._move_seconds <= end


NO_DEADLINE = PrefetchBudget(
    steps=1, minimum=1, seconds=math.inf, move_seconds=0.0
)
"""For the first batches of an epoch, which are waited for in any case."""


class StepsPerExecution:
    """How many steps the executions of one epoch iterator have.

    Processes measure different times. They run as many steps as all of them
    would, and wait for the batches of these. The memory is of all devices of
    this process together, for the batches of an execution.
    """

    def __init__(
        self, requested: int, may_choose: bool, memory: int, name: str
    ) -> None:
        self.requested = requested
        self.chosen_here = may_choose and requested == 1
        """Whether the numbers are chosen here, not by the user."""
        self.agreed_on = self.chosen_here and process_count() > 1
        """Whether all processes have to choose the same numbers."""
        self._name = name
        self._step_seconds = self._move_seconds = math.inf
        self._steps = self._equal_executions = 0
        self.next = requested
        """How many steps the next execution has at most, until `agree` is
        called again. A thread that draws its batches reads this at any time."""
        self._own_next = requested
        """The number that this process would choose."""
        self._memory = self._smallest("the memory for batches", memory)
        self._limit = None if self.chosen_here else requested
        self._executions = 0

    @property
    def limit(self) -> int:
        """The maximum number of steps of any execution of this iterator."""
        return self._limit or 1

    def agree(self) -> None:
        """Has the next execution the length that all processes can run."""
        self.next = self._smallest("the length of an execution", self._own_next)

    def _smallest(self, what: str, own: int) -> int:
        if not self.agreed_on:
            return own
        return min(all_gather_json(f"{what} of {self._name}", own))

    def grown(self, maximum: int) -> int:
        """Returns the maximum for the execution after one of `maximum`."""
        return maximum * _MAX_GROWTH if self.chosen_here else maximum

    def room_beside(self, batches: list[Any]) -> int:
        """Returns how many bytes further batches of an execution may take."""
        return self._memory - sum(map(size_in_bytes, batches))

    def note_batch(self, size: int) -> None:
        """Sets the limit by the first batch's size in bytes."""
        if self._limit is None:
            fitting = self._memory // max(size, 1)
            useful = max(EFFICIENT_STEPS, fitting // 4)
            most = min(MAX_STEPS_PER_EXECUTION, fitting, useful)
            self._limit = power_of_two(most)

    def note_execution(self, steps: int, seconds: float) -> None:
        """Chooses the length of the execution after next."""
        self._executions += 1
        # The first execution compiles.
        if self.chosen_here and self._executions > 1:
            self._step_seconds = seconds / steps
            fitting = int(MAX_EXECUTION_SECONDS * steps / seconds)
            maximum = min(self.limit, _MAX_GROWTH * steps)
            self._own_next = power_of_two(min(maximum, fitting))

    def note_move(self, batches: int, seconds: float) -> None:
        """Records a move, which may wait for the step: the shortest counts."""
        if batches:
            self._move_seconds = min(self._move_seconds, seconds / batches)

    def budget(self, steps: int) -> PrefetchBudget:
        """Returns the budget of an execution that begins now."""
        repeated = steps <= self._steps
        self._equal_executions = self._equal_executions + 1 if repeated else 1
        self._steps = steps
        stuck = self._equal_executions >= _MAX_EQUAL_EXECUTIONS
        known = math.isfinite(self._move_seconds)
        return PrefetchBudget(
            steps,
            2 * steps if stuck else steps,
            steps * self._step_seconds,
            self._move_seconds if known else 0.0,
        )
