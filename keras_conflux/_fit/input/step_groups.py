"""Makes step groups: draws the batches of an epoch ahead of use.

A `StepGroup` has the batches of the steps that one execution runs, sharded and
on their devices. While it runs, the next ones are drawn.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux._common.trees import Tree
from keras_conflux._common.waiting import DaemonCall
from keras_conflux._compat import error_texts
from keras_conflux._compat import keras_iterators
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.input.calls import Epoch
from keras_conflux._fit.input.device_batches import Batch
from keras_conflux._fit.input.device_batches import StepGroup
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.host_to_device import size_in_bytes
from keras_conflux._fit.input.steps_per_execution import INPUT_MEMORY_FRACTION
from keras_conflux._fit.input.steps_per_execution import NO_DEADLINE
from keras_conflux._fit.input.steps_per_execution import PrefetchBudget
from keras_conflux._fit.input.steps_per_execution import StepsPerExecution

_END_SECONDS = 5
"""How long the end of an epoch waits for a batch that is being drawn."""


class EndOfData(tf.errors.OutOfRangeError):
    """The data of an epoch have ended."""

    def __init__(self) -> None:
        super().__init__(None, None, "End of the data.")


@contextlib.contextmanager
def not_the_end(what: str, *, of_a_step: bool = False) -> Iterator[None]:
    """Raises another error for one that is not the end of the data.

    Keras' loops take every `tf.errors.OutOfRangeError` for the end, also one of
    an iterator from which a step draws: so they do on one device.
    """
    try:
        yield
    except EndOfData:
        raise
    except tf.errors.OutOfRangeError as error:
        if of_a_step and error_texts.is_end_of_iterator(error):
            raise
        raise tf.errors.InternalError(
            None, None, f"{what} has failed: {error_texts.reason_of(error)}"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Drawn:
    batches: list[Batch]
    count: int
    """How many batches of the data these are."""
    error: Any
    """Why there are no more, if something was raised."""
    last: Tree = None
    """The last of them, as it was drawn, if somebody follows the data."""


@dataclasses.dataclass
class _RunningEpoch:
    """The progress of an epoch, and its resources until it has ended."""

    steps: Any = None
    """The iterator that Keras enumerates."""
    note_batch: Callable[[int, Tree], None] | None = None
    """Is told which batches are trained, if somebody wants to know."""
    left: int = sys.maxsize
    """How many batches there are to draw."""
    maximum: int = 1
    """How many of them the next execution may have."""
    source: Any = None
    following: Callable[[], _Drawn] | None = None
    """Returns the batches of the next execution; `None` for the first."""
    drawing: DaemonCall | None = None
    """The call that may still be drawing them."""
    waiting: list[Any] = dataclasses.field(default_factory=list)
    """The batches that are drawn and not moved yet."""
    has_ended: bool = False
    is_complete: bool = False
    """Whether all of its batches have been drawn."""

    def start_drawing(self, draw: Callable[[], _Drawn]) -> DaemonCall:
        """Draws in another thread, for which an early end need not wait."""
        self.drawing = DaemonCall(draw)
        return self.drawing

    def end(self) -> None:
        """Ends the drawing, and drops the source."""
        self.has_ended = True
        if self.drawing is not None:
            self.drawing.wait(_END_SECONDS)
        self.steps.close()
        # The last reference to the data's iterator goes in another thread, as
        # TensorFlow may be long in deleting it: the thread that tunes its
        # pipeline sleeps in ever longer turns and can miss its end
        # (`ModelBase::OptimizeLoop`), and the source may block. A closed
        # generator may hold it, too, as in Python 3.12.3.
        held: list[Any] = [self.source, self.steps, self.following]
        self.source = self.steps = self.following = self.drawing = None
        dropping = DaemonCall(held.clear)
        if not self.is_complete:  # else nothing is drawn any more
            dropping.wait(_END_SECONDS)


class StepGroups:
    """Makes the step groups of one epoch iterator.

    Keras' `steps_per_execution` is requested. It may draw batches `ahead`.
    """

    def __init__(
        self, plan: ExecutionPlan, requested: int, ahead: bool = True
    ) -> None:
        devices = plan.strategy.devices
        memory = tensorflow_internals.memory_of(devices[0])
        self.spec: Tree = None
        """The `tf.TypeSpec`s of the batches, if not the source's."""
        self.name = plan.name
        """The name of the executed step, for messages."""
        self._plan = plan
        self._draws_ahead = ahead
        self._shard = plan.sharder()
        self._steps = StepsPerExecution(
            requested,
            plan.chooses_steps,
            int(memory * INPUT_MEMORY_FRACTION) * len(devices),
            plan.name,
        )
        self._epoch = _RunningEpoch()

    def of_epoch(
        self, observed: Epoch, number: int | None
    ) -> Generator[tuple[Any, ...], None, None]:
        """Yields `(first step, last step, step group)` for an epoch.

        Keras' own enumeration keeps count of the steps, so it is advanced only
        when their batches are there to be run. If the number of batches is
        known, so many are drawn, for a generator may go on without an end.
        """
        epoch = self._epoch = self._begun(observed, number)
        del observed  # the epoch alone is to hold the source
        try:
            for first, *last, source in epoch.steps:
                epoch.source = source
                del source
                asked = time.monotonic()
                drawn = self._next_execution(epoch)
                self._draw_ahead(epoch, drawn)
                end = self._last_of(drawn, epoch, first)
                began = time.monotonic()
                by_keras = self._plan.drawn_by_keras, self._plan.measurements
                group = StepGroup(drawn.batches, self._steps.limit, *by_keras)
                yield first, *(end for _ in last), group
                # Nothing but this keeps executions of several processes from
                # waiting long for their batches.
                since = asked if self._steps.agreed_on else began
                seconds = time.monotonic() - since
                self._steps.note_execution(drawn.count, seconds)
            epoch.is_complete = True
        finally:
            epoch.end()

    def _begun(self, observed: Epoch, number: int | None) -> _RunningEpoch:
        requested = self._steps.requested
        # Keras takes 0 for "unknown" as well. It never cuts an execution short.
        left = -(-number // requested) * requested if number else sys.maxsize
        # The first batches of an epoch are waited for.
        ending = self._plan.is_ending()
        maximum = requested if ending else self._steps.grown(requested)
        return _RunningEpoch(observed.steps, observed.note_batch, left, maximum)

    def _next_execution(self, epoch: _RunningEpoch) -> _Drawn:
        """Returns the global batches of the next execution, or raises.

        Other processes may have data after the end of this one's.
        """
        with self._plan.measurements.waiting():
            if epoch.following is None:
                maximum = min(epoch.left, epoch.maximum)
                drawn = self._draw(epoch.source, maximum, NO_DEADLINE)
            else:
                drawn = epoch.following()
        has_failed = drawn.error and not isinstance(drawn.error, EndOfData)
        if has_failed and not drawn.batches:
            raise drawn.error
        batches = self._shard.join(drawn.batches, self.spec)
        if not batches:
            epoch.is_complete = True
            raise drawn.error
        count = sum(batch.steps for batch in batches)
        epoch.left -= count
        epoch.maximum = self._steps.grown(epoch.maximum)
        self._steps.agree()
        return dataclasses.replace(drawn, batches=batches, count=count)

    def _last_of(self, drawn: _Drawn, epoch: _RunningEpoch, first: int) -> int:
        """Advances Keras' enumeration to the last step of an execution."""
        if self._steps.requested == 1:
            for _ in range(drawn.count - 1):
                next(epoch.steps)
        last = first + max(self._steps.requested, drawn.count) - 1
        if epoch.note_batch is not None:
            epoch.note_batch(last, drawn.last)
        return last

    def _draw(self, source: Any, most: int, budget: PrefetchBudget) -> _Drawn:
        """Draws batches until the budget is spent, and moves them."""
        epoch = self._epoch
        batches, error = self._next_batches(epoch, source, most, budget)
        count = len(batches)
        in_time = count == most and budget.can_move(count)
        if self._steps.chosen_here and error is None and not in_time:
            count = budget.fitting(min(self._steps.next, count))
            batches, epoch.waiting = batches[:count], batches[count:]
        began = time.monotonic()
        spec = self.spec or getattr(source, "element_spec", None)
        # Keras draws batches of `predict` one by one, so none are stacked.
        apart = self._plan.drawn_by_keras
        moves = [[each] for each in batches] if apart else [batches]
        with not_the_end(f"a batch of {self.name}"):
            sharded = [one for each in moves for one in self._shard(each, spec)]
        if budget is not NO_DEADLINE:
            self._steps.note_move(count, time.monotonic() - began)
        last = batches[-1] if batches and epoch.note_batch else None
        return _Drawn(sharded, count, error, last)

    def _next_batches(
        self,
        epoch: _RunningEpoch,
        source: Any,
        maximum: int,
        budget: PrefetchBudget,
    ) -> tuple[list[Any], Exception | None]:
        """Returns waiting and drawn batches, and an error if it ended early."""
        batches, epoch.waiting = epoch.waiting, []
        room = self._steps.room_beside(batches)
        chosen_here = self._steps.chosen_here
        try:
            wanted = min(self._steps.next, maximum)
            while len(batches) < wanted and not epoch.has_ended:
                if chosen_here and batches and budget.is_spent(len(batches)):
                    break
                with not_the_end(f"a batch of {self.name}"):
                    batches.append(keras_iterators.next_of(source))
                size = size_in_bytes(batches[-1])
                self._steps.note_batch(size)
                room -= size
                if chosen_here and room < size:
                    break  # another one like it has no room
        except StopIteration:
            # A generator cannot raise this; Keras takes the other for it.
            return batches, EndOfData()
        except Exception as error:
            return batches, error
        return batches, None

    def _draw_ahead(self, epoch: _RunningEpoch, drawn: _Drawn) -> None:
        """Begins to draw the next batches, or says how they are drawn later."""
        maximum, source = min(epoch.left, epoch.maximum), epoch.source
        in_thread = isinstance(source, tf.data.Iterator)
        budget = NO_DEADLINE
        if in_thread and self._draws_ahead and not self._steps.agreed_on:
            budget = self._steps.budget(drawn.count)
        draw = functools.partial(self._draw, source, maximum, budget)
        if drawn.error is not None or maximum < 1:
            epoch.following = lambda: _Drawn([], 0, drawn.error)
        elif not in_thread:
            epoch.following = draw
        elif self._draws_ahead:
            epoch.following = epoch.start_drawing(draw).result
        else:
            epoch.following = lambda: epoch.start_drawing(draw).result()
