"""Draws the batches of an epoch ahead of use, several per execution.

Keras' loops ask an epoch iterator for `(first step, last step, iterator)` and
hand the iterator to the train function. Here the iterator is a `StepGroup`:
the batches of the steps that one execution runs, sharded and on their devices.
While it runs, the next ones are drawn.
"""

import contextlib
import dataclasses
import functools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import tensorflow as tf

from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_iterators
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_iterators
from keras_conflux._fit.input import local_source
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import StackedBatch
from keras_conflux._fit.input.batches import StepGroup
from keras_conflux._fit.input.end_of_data import EndOfData
from keras_conflux._fit.input.end_of_data import not_the_end
from keras_conflux._fit.input.epoch_observer import Epoch
from keras_conflux._fit.input.epoch_observer import current_observer
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.execution_plan import current_plan
from keras_conflux._fit.input.host_to_device import size_in_bytes
from keras_conflux._fit.input.steps_per_execution import INPUT_MEMORY_FRACTION
from keras_conflux._fit.input.steps_per_execution import NO_DEADLINE
from keras_conflux._fit.input.steps_per_execution import PrefetchBudget
from keras_conflux._fit.input.steps_per_execution import StepsPerExecution

_JOIN_TIMEOUT = 5
"""How many seconds the end of an epoch waits for a batch that is being drawn.
"""

_step_groups: Any = weakref.WeakKeyDictionary()
"""By Keras' epoch iterators, what makes their step groups."""


def attach(iterator: Any, plan: ExecutionPlan) -> None:
    """Makes an epoch iterator of Keras yield the step groups of a plan."""
    # What a callback tells Python code at the end of a batch is in the next.
    ahead = not (plan.steered and keras_iterators.has_python_source(iterator))
    groups = StepGroups(plan, iterator.steps_per_execution, ahead)
    if plan.is_local:
        groups.spec = local_source.agree_on(iterator, plan.name)
    _step_groups[iterator] = groups


def enumerate_step_groups(
    original: Callable, iterator: Any
) -> Iterator[tuple[int, int, Any]]:
    """Yields `(first step, last step, step group)` for an epoch."""
    groups = _step_groups.get(iterator)
    number = iterator.num_batches
    epoch = current_observer().begins(iterator, original(iterator))
    if groups is None:
        return epoch.steps
    drawing = groups.of_epoch(epoch, number and number - epoch.skipped)
    plan = current_plan()
    if plan is not None:
        plan.drawing.append(drawing)
    return drawing


@contextlib.contextmanager
def catch_end(original: Callable, iterator: Any) -> Iterator[None]:
    """Ends Keras' loop at the end of the data, and at nothing else.

    Callbacks run in it as well.
    """
    groups = _step_groups.get(iterator)
    with original(iterator):
        if groups is None:
            yield
            return
        with not_the_end(groups.name, of_a_step=True):
            yield


@dataclasses.dataclass(frozen=True)
class _Drawn:
    batches: list[Batch | StackedBatch]
    count: int
    """How many batches of the data these are."""
    error: Any
    """Why there are no more, if something was raised."""
    last: Tree = None
    """The last of them, as it was drawn, if somebody follows the data."""


@dataclasses.dataclass
class _Epoch:
    """What a thread that draws may still hold when the epoch has ended."""

    is_followed: bool = False
    """Whether somebody wants to know which batches are trained."""
    waiting: list[Any] = dataclasses.field(default_factory=list)
    """The batches that are drawn and not moved yet."""
    has_ended: bool = False
    is_complete: bool = False
    """Whether all of its batches have been drawn."""


class StepGroups:
    """Makes the step groups of one epoch iterator.

    Args:
        plan: That of the call that the iterator was made in.
        requested: Keras' `steps_per_execution`.
        ahead: Whether batches may be drawn before they are asked for.
    """

    def __init__(
        self, plan: ExecutionPlan, requested: int, ahead: bool = True
    ) -> None:
        devices = plan.strategy.devices
        memory = tensorflow_internals.memory_of(devices[0])
        self.spec: Tree = None
        """The `tf.TypeSpec`s of the batches, if not those of the source."""
        self.name = plan.name
        """What is executed, as messages say it."""
        self._plan = plan
        self._draws_ahead = ahead
        self._shard = plan.sharder()
        self._steps = StepsPerExecution(
            requested,
            plan.chooses_steps,
            int(memory * INPUT_MEMORY_FRACTION) * len(devices),
            plan.name,
        )
        self._epoch = _Epoch()

    def of_epoch(
        self, observed: Epoch, number: int | None
    ) -> Generator[tuple[int, int, StepGroup], None, None]:
        """Yields `(first step, last step, step group)` for an epoch.

        Args:
            observed: Keras' own enumeration. It keeps count of the steps, so
                it is advanced only when their batches are there to be run.
            number: How many batches the epoch has, if it is known; so many
                are drawn, for a generator may go on without an end.
        """
        # Keras, too, takes 0 for unknown, and its executions are of whole size.
        requested = self._steps.requested
        left = -(-number // requested) * requested if number else sys.maxsize
        following = source = None
        steps, note_batch = observed.steps, observed.note_batch
        epoch = self._epoch = _Epoch(note_batch is not None)
        # The first batches of an epoch are waited for.
        ending = self._plan.is_ending()
        maximum = requested if ending else self._steps.grown(requested)
        background = _DaemonThread("conflux-batches")
        try:
            for first, last, source in steps:
                asked = time.monotonic()
                with self._plan.measurements.waiting():
                    if following is None:
                        most = min(left, maximum)
                        drawn = self._draw(source, most, NO_DEADLINE)
                    else:
                        drawn = following()
                maximum = self._steps.grown(maximum)
                drawn = self._joined(drawn)
                if not drawn.batches:
                    epoch.is_complete = isinstance(drawn.error, EndOfData)
                    raise drawn.error
                left -= drawn.count
                self._steps.agree()
                following = self._ahead(
                    background, source, min(left, maximum), drawn
                )
                if requested == 1:
                    for _ in range(drawn.count - 1):
                        last = next(steps)[1]
                if note_batch is not None:
                    note_batch(last, drawn.last)
                began = time.monotonic()
                yield (
                    first,
                    last,
                    StepGroup(
                        drawn.batches,
                        self._steps.limit,
                        self._plan.drawn_by_keras,
                        self._plan.measurements,
                    ),
                )
                # Nothing but this keeps executions of several processes from
                # waiting long for their batches.
                since = asked if self._steps.agreed_on else began
                self._steps.note_execution(
                    drawn.count, time.monotonic() - since
                )
            epoch.is_complete = True
        finally:
            epoch.has_ended = True
            background.end()
            steps.close()
            # The last reference to the data's iterator goes in another thread,
            # as TensorFlow may be long in deleting it: what tunes its pipeline
            # sleeps in ever longer turns and can miss its end
            # (`ModelBase::OptimizeLoop`), and the source may block. A closed
            # generator may hold it, too, as those of Python 3.12.3 do.
            held: list[Any] = [source, steps]
            del source, steps
            end = threading.Thread(
                target=held.clear, name="conflux-end", daemon=True
            )
            end.start()
            if not epoch.is_complete:  # else nothing is drawn any more
                end.join(_JOIN_TIMEOUT)

    def _draw(
        self, source: Any, maximum: int, budget: PrefetchBudget
    ) -> _Drawn:
        """Draws batches until the budget is spent, and moves what fits."""
        epoch = self._epoch
        batches, error = self._next_batches(epoch, source, maximum, budget)
        count = len(batches)
        in_time = count == maximum and budget.can_move(count)
        if self._steps.chosen_here and error is None and not in_time:
            count = budget.fitting(min(self._steps.next, count))
            batches, epoch.waiting = batches[:count], batches[count:]
        began = time.monotonic()
        spec = self.spec or getattr(source, "element_spec", None)
        with not_the_end(f"a batch of {self.name}"):
            sharded = self._shard(batches, spec)
        if budget is not NO_DEADLINE:
            self._steps.timings.note_move(count, time.monotonic() - began)
        last = batches[-1] if batches and epoch.is_followed else None
        return _Drawn(sharded, count, error, last)

    def _joined(self, drawn: _Drawn) -> _Drawn:
        """Makes global batches of what is drawn, which may be a part of them.

        Where other processes still have data, they are there after the end of
        this one's.
        """
        has_failed = drawn.error and not isinstance(drawn.error, EndOfData)
        if has_failed and not drawn.batches:
            raise drawn.error
        batches = self._shard.join(drawn.batches, self.spec)
        count = sum(getattr(batch, "count", 1) for batch in batches)
        return dataclasses.replace(drawn, batches=batches, count=count)

    def _next_batches(
        self,
        epoch: _Epoch,
        source: Any,
        maximum: int,
        budget: PrefetchBudget,
    ) -> tuple[list[Any], Exception | None]:
        """Returns what has waited and what is drawn, and why it ended early."""
        batches, epoch.waiting = epoch.waiting, []
        room = self._steps.room_beside(batches)
        chosen_here = self._steps.chosen_here
        try:
            wanted = min(self._steps.next, maximum)
            while len(batches) < wanted and not epoch.has_ended:
                if chosen_here and batches and budget.is_spent(len(batches)):
                    break
                with not_the_end(f"a batch of {self.name}"):
                    batches.append(tensorflow_iterators.next_of(source))
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

    def _ahead(
        self,
        background: "_DaemonThread",
        source: Any,
        maximum: int,
        drawn: _Drawn,
    ) -> Callable[[], _Drawn]:
        """Returns what gives the next batches, which may be under way."""
        budget = NO_DEADLINE
        if self._draws_ahead and not self._steps.agreed_on:
            budget = self._steps.timings.budget(drawn.count)
        if drawn.error is not None or maximum < 1:
            return lambda: _Drawn([], 0, drawn.error)
        if isinstance(source, tf.data.Iterator):
            draw = functools.partial(self._draw, source, maximum, budget)
            if self._draws_ahead:
                return background.submit(draw).result
            return lambda: background.submit(draw).result()
        return functools.partial(self._draw, source, maximum, NO_DEADLINE)


class _DaemonThread:
    """Calls functions one after another.

    Unlike an executor of `concurrent.futures`, it does not keep Python from
    ending, and is waited for some seconds only: training that ends early, by an
    error or an interrupt, does not wait for a source of data that blocks.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=name, daemon=True
        )
        self._thread.start()

    def submit(self, function: Callable[[], _Drawn]) -> "Future[_Drawn]":
        future: Future[_Drawn] = Future()
        self._tasks.put((function, future))
        return future

    def end(self) -> None:
        """Ends the thread, after the function that it is at."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, future = task
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del task, function, future  # which hold batches and their source
