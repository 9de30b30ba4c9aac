"""A step as one TensorFlow graph for all replicas, not compiled by XLA."""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.contexts import having
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._fit.execution.traced_program import StepPrograms
from keras_conflux._fit.execution.traced_program import TracedProgram
from keras_conflux._fit.input.device_batches import Batch
from keras_conflux._fit.input.device_batches import batch_fractions
from keras_conflux._replication import sums
from keras_conflux._replication.steps import Place


class GraphProgram(StepPrograms):
    """Runs a step for one batch after another, of any sizes."""

    def __call__(self, batches: Iterable[Batch]) -> trees.Tree:
        """Runs a step per batch and returns the last one's result."""
        result = None
        for batch in batches:
            result = self._run(batch)
        return result

    def _run(self, batch: Batch) -> trees.Tree:
        trace = functools.partial(self._trace, batch)
        # Shards of known sizes may be new to one process alone.
        is_common = not batch.sizes_are_known
        program = self._program(batch.signature, trace, is_common)
        if 0 in batch.sizes:
            self._step.warn_of_merged()
        return program(batch.shards, _constant(batch.sizes))

    def _trace(self, batch: Batch) -> TracedProgram:
        specs = [trees.present(spec) for spec in batch.specs]
        known = batch.sizes if batch.sizes_are_known else None

        def packed(shards: list[list[Any]], sizes: tf.Tensor) -> trees.Tree:
            noting = tensorflow_tracing.noting_new_variables()
            with noting as made, having(self._step, made=made):
                filled = map(trees.refill, batch.specs, shards)
                result = self._all_replicas([*filled], sizes, known)
            if not made:  # else TensorFlow traces this once more
                self._step.raise_if_retrace_needed()
            return result

        count = self._communicator.size
        signature = [specs, tf.TensorSpec([count], tf.int64)]
        given = self._communicator, self._watchdog, packed, signature
        return TracedProgram(*given)

    def _all_replicas(
        self,
        shards: list[trees.Tree],
        sizes: tf.Tensor,
        known: tuple[int, ...] | None = None,
    ) -> trees.Tree:
        count, first = self._communicator.size, self._communicator.rank(0)
        own = slice(first, first + len(shards))  # this process' replicas
        numbers: list[Any] = tf.unstack(sizes, count)
        # All replicas have samples where their numbers are known.
        each = [None] * len(shards) if known else numbers[own]
        fractions = batch_fractions(known or numbers)[own]
        places = _places(sizes, count)[own]
        outputs: dict[int, trees.Tree] = {}

        @sums.adds_up
        @tf.autograph.experimental.do_not_convert
        def one_replica() -> None:
            index = replica_index()
            output = self._step.on_replica(
                shards[index],
                fractions[index],
                lambda: places[index],
                each[index],
            )
            self._step.after_steps()
            outputs[index] = self._watchdog.mark_end(index, output)

        self._strategy.run(one_replica)
        ordered = [outputs[index] for index in range(len(shards))]
        return self._step.merge(ordered, fractions, each)


def _places(sizes: tf.Tensor, count: int) -> list[Place]:
    """Returns where the samples of all replicas are."""
    with tf.device("CPU:0"):
        numbers = (
            tf.maximum(sizes, 1),
            tf.cumsum(sizes, exclusive=True),
            tf.reduce_sum(sizes),
        )
        own, before, total = (tf.cast(x, tf.uint64) for x in numbers)
        own, before = tf.unstack(own, count), tf.unstack(before, count)
    return [Place(*each, total) for each in zip(own, before, strict=True)]


@functools.lru_cache(maxsize=1024)
def _constant(sizes: tuple[int, ...]) -> tf.Tensor:
    """Returns numbers as a tensor, which is not made again in each step."""
    with tf.init_scope():
        return tf.constant(sizes, tf.int64)
