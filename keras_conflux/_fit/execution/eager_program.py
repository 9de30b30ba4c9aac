"""A step without a graph, which runs once, on the whole batch."""

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._fit.execution.replica_step import ReplicaStep
from keras_conflux._fit.input.batches import Batch
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import on_whole_batch
from keras_conflux._replication.strategy import outside_of_strategies


class EagerProgram:
    """Runs a step as one device does, for one batch after another.

    Args:
        step: What one device does.
        strategy: What replicates the model.
    """

    def __init__(self, step: ReplicaStep, strategy: ReplicatedStrategy) -> None:
        self._step = step
        self._strategy = strategy

    def __call__(self, batch: Batch) -> Tree:
        """Runs the step on a batch that lies on the first device."""
        (leaves,) = batch.shards
        data = trees.refill(batch.specs[0], leaves)
        return outside_of_strategies(lambda: self._run(data))

    def _run(self, data: Tree) -> Tree:
        with (
            on_whole_batch(self._strategy),
            tf.device(self._strategy.devices[0]),
        ):
            return self._step.on_whole_batch(data)
