"""A step as one TensorFlow graph for all replicas, not compiled by XLA."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.execution.replica_step import Work
from keras_conflux._fit.execution.watchdog import Watch
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import shares
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import replica_index


class GraphProgram:
    """Runs a step for one batch after another, of any sizes.

    Args:
        work: What the replicas do.
        strategy: What replicates the model.
        eager: Whether to run without a graph, for debugging.
    """

    def __init__(
        self, work: Work, strategy: ReplicatedStrategy, eager: bool = False
    ) -> None:
        self._work = work
        self._strategy = strategy
        self._eager = eager
        self._watch = Watch(strategy.devices, work.name)
        self._traced: dict[Any, Callable] = {}

    def __call__(self, batches: Iterable[Batch]) -> Tree:
        """Runs a step a batch and returns the last one's result."""
        result = None
        for batch in batches:
            sizes = tf.constant(batch.sizes, tf.int64)
            if self._eager:
                parts = _refilled(batch.specs, batch.parts)
                result = self._all_replicas(parts, sizes)
                continue
            if batch.signature not in self._traced:
                self._traced[batch.signature] = self._trace(batch)
            result = self._watch.call(
                self._traced[batch.signature], batch.parts, sizes
            )
        return result

    def _trace(self, batch: Batch) -> Callable:
        specs = [trees.present(spec) for spec in batch.specs]

        def packed(parts: list[list[Any]], sizes: tf.Tensor) -> Tree:
            return self._all_replicas(_refilled(batch.specs, parts), sizes)

        signature = [specs, tf.TensorSpec([len(specs)], tf.int64)]
        return tensorflow_internals.graph_function(packed, signature)

    def _all_replicas(self, parts: list[Tree], sizes: tf.Tensor) -> Tree:
        each = tf.unstack(sizes, len(parts))
        weights = shares(each)
        outputs: dict[int, Tree] = {}

        @tf.autograph.experimental.do_not_convert
        def one_replica() -> None:
            index = replica_index()
            output = self._work.on_replica(
                parts[index], weights[index], each[index]
            )
            self._work.after_steps(weights[index])
            outputs[index] = self._watch.note_end(index, output)

        self._strategy.run(one_replica)
        ordered = [outputs[index] for index in range(len(parts))]
        return self._work.merge(ordered, weights, each)


def _refilled(structures: list[Tree], parts: list[list[Any]]) -> list[Tree]:
    return [
        trees.refill(structure, leaves)
        for structure, leaves in zip(structures, parts, strict=True)
    ]
