"""`microbatches="auto"`: the fewest turns for which there is memory.

Nothing is tried that could fail. The first step runs one sample a turn, and
what it takes is measured. All that grows with the samples of a turn at most
doubles when these double, so it is known which larger turns fit. The next step
runs these, and is measured, until nothing larger is sure to fit. Each of these
steps is one of the training, which is the same for any number of turns.
"""

import dataclasses
import operator
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.notices import tell
from keras_conflux._common.trees import Tree
from keras_conflux._compat import tensorflow_internals
from keras_conflux._devices.device import Device
from keras_conflux._extensions.memory import table
from keras_conflux._fit.execution.microbatches import refuse_others
from keras_conflux._fit.execution.replica_step import ReplicaStep
from keras_conflux._fit.execution.turns import NumberOfTurns
from keras_conflux._fit.execution.turns import choose_by
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import StackedBatch
from keras_conflux._fit.input.batches import StepGroup
from keras_conflux._fit.input.host_to_device import is_dense
from keras_conflux._fit.input.host_to_device import size_in_bytes
from keras_conflux._replication.strategy import ReplicatedStrategy

USED = 0.9
"""How much of a device's memory a step may take. The allocator needs pieces
that are whole, and batches are moved while a step runs."""
GROWTH = 8
"""How many times the samples of a turn the next has at most, if there is a
choice. Programs for one sample are other ones than those for many."""


class Use(NamedTuple):
    """What is in use of a device's memory, in bytes."""

    now: int
    peak: int
    """The most since it was last set back."""
    limit: int
    """What there is."""


def tells(device: Device) -> bool:
    """Whether TensorFlow tells what memory of a device is in use."""
    try:
        return device.kind == "GPU" and used(device).limit > 0
    except (ValueError, tf.errors.OpError):  # of an allocator without numbers
        return False


def used(device: str) -> Use:
    """Returns what is in use of a device."""
    found = tf.config.experimental.get_memory_info(device)
    limit = tensorflow_internals.memory_of(device)
    return Use(found["current"], found["peak"], limit)


def set_back(device: str) -> None:
    """Has the peak of a device's memory measured anew."""
    tf.config.experimental.reset_memory_stats(device)


def install() -> None:
    """Has turns chosen by memory. Called once, at import."""
    choose_by(_chooser)


_told: Any = weakref.WeakSet()
"""Models of which it has been said that nothing is chosen."""


def _chooser(
    model: keras.Model, step: ReplicaStep, strategy: ReplicatedStrategy
) -> NumberOfTurns:
    refuse_others(model.name, strategy)
    step.turns_may_change = True
    if all(map(tells, strategy.devices)):
        return FittingTurns(step, strategy.devices)
    if model not in _told:
        _told.add(model)
        tell(
            f'{model.name}: microbatches="auto" is 1, as '
            f"{strategy.devices[0]} does not tell what memory is in use"
        )
    return NumberOfTurns(1)


_Shape = tuple[tuple[int, ...], ...]
"""Of the leaves of the largest part that a device has of a batch, each with
the bytes of an entry at its end."""


@dataclasses.dataclass
class _Found:
    """What is known of batches of a shape, and of all that are smaller."""

    shape: _Shape
    compiled: bool
    rows: int = 1
    """How many samples of a turn fit."""
    is_final: bool = False

    def holds_for(self, shape: _Shape, compiled: bool) -> bool:
        """Whether batches of a shape are nowhere larger."""
        return (compiled, len(shape)) == (
            self.compiled,
            len(self.shape),
        ) and all(
            len(large) == len(small) and all(map(operator.ge, large, small))
            for large, small in zip(self.shape, shape, strict=True)
        )


class FittingTurns(NumberOfTurns):
    """As few turns as fit into the memory of each device.

    Args:
        step: What runs.
        devices: Where.
    """

    may_be_several = True

    def __init__(self, step: ReplicaStep, devices: Sequence[str]) -> None:
        self._step = step
        self._devices = devices
        self._found: list[_Found] = []
        self._spare = 0
        self._told: set[int] = set()

    def begins(self, group: StepGroup) -> None:
        """See `NumberOfTurns`. The next group may come at any time."""
        shards = [batch.shards[0] for batch in group.batches]
        self._spare = sum(map(size_in_bytes, shards))

    def run(
        self, batch: Batch, compiled: bool, run: Callable[[int], Tree]
    ) -> Tree:
        """See `NumberOfTurns`."""
        shape = _shape(self._step.name, batch)
        found = self._found_for(shape, compiled)
        turns = fewest_turns(shape[0][0], found.rows, compiled)
        try:
            if found.is_final or found.shape != shape:
                return run(turns)
            return self._measured(batch, found, turns, run)
        except tf.errors.ResourceExhaustedError as error:
            self._found.remove(found)
            error.add_note(
                f'{self._step.name}: microbatches="auto" ran {shape[0][0]} '
                f"samples of a device in {turns} parts."
            )
            raise

    def _found_for(self, shape: _Shape, compiled: bool) -> _Found:
        for each in self._found:
            if each.holds_for(shape, compiled):
                return each
        self._found.insert(0, _Found(shape, compiled))
        return self._found[0]

    def _measured(
        self,
        batch: Batch,
        found: _Found,
        turns: int,
        run: Callable[[int], Tree],
    ) -> Tree:
        """Runs a program and finds out which larger turns are sure to fit."""
        before = [*map(used, self._devices)]
        for device in self._devices:
            set_back(device)
        result = run(turns)
        samples = found.shape[0][0]
        own = max(1, -(-samples // turns))
        uses = zip(before, map(used, self._devices), strict=True)
        times = min(
            times_that_fit(old, new, self._step.kept_bytes, self._spare)
            for old, new in uses
        )
        fitting = max(1, int(times * own))
        fewest = fewest_turns(samples, fitting, found.compiled)
        found.is_final = fewest >= turns
        near = min(fitting, GROWTH * own)
        nearest = fewest_turns(samples, near, found.compiled)
        if nearest < turns:
            fewest = nearest
        found.rows = max(1, -(-samples // fewest))
        if found.is_final and fewest not in self._told:
            self._told.add(fewest)
            self._tell(fewest, batch)
        return result

    def _tell(self, turns: int, batch: Batch) -> None:
        use = max(map(used, self._devices), key=lambda use: use.peak)
        tell(
            f'{self._step.name}: microbatches="auto" is {turns} in '
            f"{getattr(self._step.on_whole_batch, '__name__', 'a step')}, for "
            f"batches of {sum(batch.sizes)}: at most "
            f"{table.readable(use.peak)} of {table.readable(use.limit)}"
        )


def fewest_turns(samples: int, rows: int, compiled: bool) -> int:
    """Returns the least number of turns that have at most so many samples.

    Args:
        samples: Of the device.
        rows: Of a turn.
        compiled: Whether XLA compiles turns, which are equal then.
    """
    turns = max(1, -(-samples // rows))
    while compiled and samples % turns:
        turns += 1
    return turns


def times_that_fit(before: Use, after: Use, kept: int, spare: int) -> float:
    """Returns by how much the samples of a turn can surely be multiplied.

    All that there is at a time of a step either does not depend on these
    samples, or comes on top of what was there before the step and of what turns
    add up. The latter grows at most as they do.

    Args:
        before: What was in use before a step.
        after: And after it, with its peak.
        kept: How many bytes all turns of the step find added up by others.
        spare: How many bytes to leave.
    """
    floor = min(before.now, after.now)
    if after.peak > floor + kept:  # else it lies in what was there before
        floor += kept
    return (USED * after.limit - spare - floor) / max(1, after.peak - floor)


def _shape(name: str, batch: Batch) -> _Shape:
    stacked = isinstance(batch, StackedBatch)
    leaves = [leaf for shard in batch.shards for leaf in shard]
    if all(map(is_dense, leaves)):
        shards = [
            [(*x.shape[stacked:], x.dtype.size) for x in shard]
            for shard in batch.shards
        ]
        shape = tuple(
            tuple(map(max, zip(*each, strict=True)))
            for each in zip(*shards, strict=True)
        )
        if len({each[:1] for each in shape}) == 1 and len(shape[0]) > 1:
            return shape
    raise NotImplementedError(
        f'{name}: `microbatches="auto"` tells from the shape of a batch what '
        "it takes, so all leaves have to be dense tensors of numbers, with one "
        f"row a sample. Received: {', '.join(map(trees.describe, leaves))}. "
        "Give a number."
    )
