"""Draws the batches of an epoch ahead of use, several for one call.

Keras' loops ask an epoch iterator for `(first step, last step, iterator)` and
hand the iterator to the train function. Here the iterator is a `Chunk`: the
batches of the steps that one call runs, split and on their devices. While it
runs, the next one is drawn.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import Splitter
from keras_conflux._fit.input.batches import Stack
from keras_conflux._fit.input.host_to_device import size_in_bytes
from keras_conflux._fit.input.steps_per_execution import ENDLESS
from keras_conflux._fit.input.steps_per_execution import Pace
from keras_conflux._fit.input.steps_per_execution import Window
from keras_conflux._fit.input.steps_per_execution import power_of_two
from keras_conflux._replication.strategy import ReplicatedStrategy

MOST_STEPS = 256
"""At most so many steps a call."""
SECONDS = 4.0
"""How long a call of several steps may last, so that the progress bar moves
and an interrupt is heard."""
MEMORY = 1 / 32
"""The part of a device's memory that the batches of a call may take."""

_GROWTH = 4


@dataclasses.dataclass
class Chunk:
    """The batches of one call. An iterator over its pieces, too."""

    pieces: list[Batch | Stack]
    limit: int
    """The most batches that chunks of this epoch have."""

    def __next__(self) -> Batch | Stack:
        if not self.pieces:
            raise StopIteration
        return self.pieces.pop(0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the epochs of a `fit` or `evaluate` are cut into calls."""

    stacks: bool = False
    """Whether batches are stacked, for XLA."""
    free: bool = False
    """Whether a call may run more steps than the user has asked for."""
    is_ending: Callable[[], bool] = lambda: False
    """Whether the next call is to be the last."""
    running: list[Generator] = dataclasses.field(default_factory=list)
    """What draws the chunks. Keras leaves one half-way when it stops early."""


_local = threading.local()


@contextlib.contextmanager
def planned(plan: Plan) -> Iterator[None]:
    """Makes a plan that of the epoch iterators which are made here."""
    before = _current_plan()
    _local.plan = plan
    try:
        yield
    finally:
        _local.plan = before
        for chunks in plan.running:
            chunks.close()


def _current_plan() -> Plan:
    return getattr(_local, "plan", Plan())


def attach(iterator: Any, strategy: ReplicatedStrategy) -> None:
    """Makes an epoch iterator yield chunks for a strategy."""
    asked = iterator.steps_per_execution
    iterator._conflux_chunks = _Chunks(strategy, asked, _current_plan())


def enumerate_chunks(original: Callable, iterator: Any) -> Iterator[tuple]:
    """Yields `(first step, last step, chunk)` for an epoch."""
    chunks = getattr(iterator, "_conflux_chunks", None)
    steps = original(iterator)
    if chunks is None:
        return steps
    running = chunks.of(steps, iterator.num_batches)
    _current_plan().running.append(running)
    return running


@dataclasses.dataclass(frozen=True)
class _Drawn:
    pieces: list[Batch | Stack]
    count: int
    """How many batches the pieces are."""
    error: Any
    """Why there are no more, if something was raised."""


class _Chunks:
    """Makes the chunks of one epoch iterator.

    Args:
        strategy: What replicates the model.
        asked: How many steps a call the user has asked for.
        plan: What else is known.
    """

    def __init__(
        self, strategy: ReplicatedStrategy, asked: int, plan: Plan
    ) -> None:
        memory = tensorflow_internals.memory_of(strategy.devices[0]) * MEMORY
        self._room = int(memory) * len(strategy.devices)
        self._split = Splitter(strategy, plan.stacks)
        self._asked = asked
        self._free = plan.free and asked == 1
        self._is_ending = plan.is_ending
        self._limit = None if self._free else asked
        self._size = asked
        self._calls = 0
        self._pace = Pace()
        self._waiting: list[Any] = []

    def of(
        self, steps: Iterator[tuple], number: int | None
    ) -> Generator[tuple[int, int, Chunk], None, None]:
        """Yields `(first step, last step, chunk)` for an epoch.

        Args:
            steps: Keras' own enumeration. It keeps count of the steps, so it
                is advanced only when their batches are there to be run.
            number: How many batches the epoch has, if it is known; so many
                are drawn, for a generator may go on for ever.
        """
        # Keras, too, takes 0 for unknown, and its calls are of whole size.
        left = (
            -(-number // self._asked) * self._asked if number else sys.maxsize
        )
        following = source = None
        self._waiting = []
        # The first batches of an epoch are waited for.
        several = self._free and not self._is_ending()
        most = _GROWTH if several else self._asked
        with ThreadPoolExecutor(1, "conflux-batches") as pool:
            for first, last, source in steps:
                if following is None:
                    drawn = self._draw(source, min(left, most), ENDLESS)
                else:
                    drawn = following()
                most *= _GROWTH if self._free else 1
                if not drawn.pieces:
                    raise drawn.error
                left -= drawn.count
                window = self._pace.window(drawn.count)
                following = self._ahead(
                    pool, source, min(left, most), window, drawn.error
                )
                if self._asked == 1:
                    for _ in range(drawn.count - 1):
                        last = next(steps)[1]
                began = time.monotonic()
                yield first, last, Chunk(drawn.pieces, self._limit or 1)
                self._learn(drawn.count, time.monotonic() - began)
        # The last reference to the data's iterator goes in another thread, as
        # TensorFlow may be long in deleting it: what tunes its pipeline sleeps
        # in ever longer turns and can miss its end (`ModelBase::OptimizeLoop`).
        held, source = [source], None
        threading.Thread(target=held.clear, name="conflux-end").start()

    def _draw(self, source: Any, most: int, window: Window) -> _Drawn:
        """Draws batches until it is time, and moves those of the next call."""
        batches, error = self._next_batches(source, most, window)
        count = len(batches)
        is_all = error is not None or (count == most and window.can_move(count))
        if self._free and not is_all:
            count = window.fitting(min(self._size, count))
            batches, self._waiting = batches[:count], batches[count:]
        began = time.monotonic()
        spec = getattr(source, "element_spec", None)
        pieces = self._split(batches, spec)
        if window is not ENDLESS:
            self._pace.note_move(count, time.monotonic() - began)
        return _Drawn(pieces, count, error)

    def _next_batches(
        self, source: Any, most: int, window: Window
    ) -> tuple[list[Any], Exception | None]:
        """Returns what has waited and what is drawn, and why it ended early."""
        batches, self._waiting = self._waiting, []
        room = self._room - sum(map(size_in_bytes, batches))
        try:
            while len(batches) < min(self._size, most):
                if self._free and batches and window.is_over(len(batches)):
                    break
                batches.append(next(source))
                size = size_in_bytes(batches[-1])
                self._set_limit(size)
                room -= size
                if self._free and room < size:
                    break  # another one like it has no room
        except StopIteration:
            # A generator cannot raise this; Keras takes the other for it.
            end = tf.errors.OutOfRangeError(None, None, "End of the data.")
            return batches, end
        except Exception as error:
            return batches, error
        return batches, None

    def _ahead(
        self,
        pool: ThreadPoolExecutor,
        source: Any,
        most: int,
        window: Window,
        error: Exception | None,
    ) -> Callable[[], _Drawn]:
        """Returns what gives the next batches, which may be under way."""
        if error is not None or most < 1:
            return lambda: _Drawn([], 0, error)
        if isinstance(source, tf.data.Iterator):
            return pool.submit(self._draw, source, most, window).result
        return functools.partial(self._draw, source, most, ENDLESS)

    def _set_limit(self, size: int) -> None:
        if self._limit is None:
            fitting = self._room // max(size, 1)
            self._limit = power_of_two(min(MOST_STEPS, fitting))

    def _learn(self, count: int, seconds: float) -> None:
        """Chooses how many steps the next call but one runs."""
        self._calls += 1
        # The first call compiles.
        if self._free and self._calls > 1:
            self._pace.note_call(count, seconds)
            fitting = int(SECONDS * count / seconds)
            most = min(self._limit or 1, _GROWTH * count)
            self._size = power_of_two(min(most, fitting))
