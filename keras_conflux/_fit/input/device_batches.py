"""Batches that lie on the devices, and the batches of one execution."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from typing import Self

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import StrategyError
from keras_conflux._fit.input import specs
from keras_conflux._fit.input.host_to_device import batch_at
from keras_conflux._fit.input.measurements import Measurements


@dataclasses.dataclass(frozen=True)
class Batch:
    """A global batch, sharded over the replicas."""

    shards: list[list[Any]]
    """Per replica of this process, the leaves that are not `None`. A replica
    without samples gets one of another's to run on."""
    sizes: tuple[int, ...]
    """Per replica of all processes, how many of the samples it has; may be 0.
    """
    specs: list[trees.Tree]
    """Per replica of this process, the `tf.TypeSpec`s of its program."""
    steps: int = 1
    """The number of global batches."""
    checksum: int = 0
    """A number that is equal for equal batches."""

    def __iter__(self) -> "Iterator[Batch]":
        """Yields the global batches one by one."""
        yield self

    @property
    def samples(self) -> int:
        """The number of samples of all global batches together."""
        return self.steps * sum(self.sizes)

    @property
    def sizes_are_known(self) -> bool:
        """Whether programs are traced for the number of samples."""
        return all(map(specs.sizes_are_known, self.specs))

    def opened(self) -> Self:
        """Returns the batch, for programs of any number of samples."""
        return dataclasses.replace(
            self, specs=[specs.opened(each) for each in self.specs]
        )

    @property
    def signature(self) -> tuple:
        """The properties that two batches of one trace share."""
        return tuple(
            (str(trees.paths(each)), tuple(trees.flatten(each)))
            for each in self.specs
        )


@dataclasses.dataclass(frozen=True)
class StackedBatch(Batch):
    """Batches of one shape that divide evenly, in leaves of one more axis.

    `sizes` and `specs` describe one batch.
    """

    @property
    def shape(self) -> tuple:
        """The shapes and dtypes of a replica's shard of one batch."""
        return tuple((tuple(x.shape[1:]), x.dtype.name) for x in self.shards[0])

    def __iter__(self) -> Iterator[Batch]:
        """See `Batch`."""
        for position in range(self.steps):
            shards = [
                [batch_at(leaf, position) for leaf in shard]
                for shard in self.shards
            ]
            yield Batch(shards, self.sizes, self.specs)


@dataclasses.dataclass
class StepGroup:
    """The batches of one execution. An iterator over them, too."""

    batches: list[Batch]
    limit: int
    """The maximum number of batches of the step groups of this epoch."""
    drawn_by_keras: bool = False
    """Whether Keras' loop draws them one by one, as in `predict`."""
    measurements: Measurements = dataclasses.field(default_factory=Measurements)
    """Where the execution is to be added."""

    def __str__(self) -> str:
        """Describes the facts that have to be alike in all processes."""
        sizes = [(sum(b.sizes), b.steps) for b in self.batches]
        checksums = [batch.checksum for batch in self.batches]
        return f"(samples, batches) {sizes} with the checksums {checksums}"

    def __next__(self) -> Batch:
        if not self.drawn_by_keras:
            raise StrategyError(
                "The train or test function of a replicated model gets batches "
                "that lie on the devices already, and drew one itself. A "
                "`make_train_function` or `make_test_function` of your own "
                "can wrap the function of `super()`, but not replace it. "
                "Write a `train_step` or `test_step` instead, or call "
                "`keras_conflux.unreplicate` on the model."
            )
        if not self.batches:
            raise StopIteration
        return self.batches.pop(0)


def batch_fractions(sizes: Any) -> list[tf.Tensor]:
    """Returns each replica's fraction of the samples; they add up to one.

    Sizes that are known while tracing make constants, of which XLA makes use.
    """
    # In float64 where models compute in it.
    dtype = "float64" if keras.config.floatx() == "float64" else "float32"
    if all(isinstance(size, int) for size in sizes):
        return [tf.constant(size / sum(sizes), dtype) for size in sizes]
    floats = [tf.cast(size, dtype) for size in sizes]
    total = tf.add_n(floats)
    return [tf.math.divide_no_nan(size, total) for size in floats]
