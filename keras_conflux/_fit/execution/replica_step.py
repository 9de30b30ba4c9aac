"""What each replica does with its shard of a batch, and the common result."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import keras
import tensorflow as tf

from keras_conflux._common.trees import Tree
from keras_conflux._data import rows
from keras_conflux._fit.numerics import layer_state
from keras_conflux._fit.numerics import logs
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_index


class ReplicaStep(Protocol):
    """One step of all replicas."""

    name: str
    """What a warning calls it."""

    def on_replica(
        self, shard: Tree, fraction: Any, size: Any, in_xla: bool = False
    ) -> Tree:
        """Runs a replica's step. Traced once per replica, in replica order.

        Args:
            shard: The replica's shard of the global batch.
            fraction: A scalar: its number of samples over the global batch's.
            size: Its number of samples, which may be 0; `None` if it cannot.
            in_xla: Whether what is traced becomes part of an XLA program.
        """
        ...

    def after_steps(self, fraction: Any) -> None:
        """Does what once after many steps of the same fraction will do.

        Traced once per replica, after `on_replica`.
        """
        ...

    def merge(self, outputs: list[Tree], fractions: list, sizes: list) -> Tree:
        """Makes one result of what the replicas returned."""
        ...


class _ModelStep:
    """Runs a step of a model, and makes what its layers keep equal."""

    def __init__(self, model: keras.Model) -> None:
        self.name = model.name
        self._model = model
        self._contexts: dict[int, StepContext] = {}

    def on_replica(
        self, shard: Tree, fraction: Any, size: Any, in_xla: bool = False
    ) -> Tree:
        """See `ReplicaStep`."""
        eager = tf.executing_eagerly()
        context = StepContext(
            self.name,
            in_xla=in_xla,
            batch_fraction=fraction,
            graph=None if eager else tf.compat.v1.get_default_graph(),
        )
        self._contexts[replica_index()] = context
        with step_context.entered(context):
            output = self._run(shard, size, context)
            layer_state.reduce_states(self._model, context)
        return output

    def _run(self, shard: Tree, size: Any, context: StepContext) -> Tree:
        raise NotImplementedError

    def after_steps(self, fraction: Any) -> None:
        """See `ReplicaStep`."""
        context = self._contexts[replica_index()]
        with step_context.entered(context):
            layer_state.average(context, fraction)


class TrainOrTestStep(_ModelStep):
    """A `train_step` or `test_step`, whose result is the logs."""

    def __init__(self, model: keras.Model, step: Callable) -> None:
        super().__init__(model)
        self._step = step

    def _run(self, shard: Tree, size: Any, context: StepContext) -> Tree:
        before = logs.metric_state(self._model, size)
        with logs.noting_results(self._model) as noted:
            output = self._step(shard)
        context.named = logs.metrics_by_name(output, noted)
        logs.restore(before, size, context)
        return output

    def merge(self, outputs: list[Tree], fractions: list, sizes: list) -> Tree:
        """See `ReplicaStep`."""
        del sizes
        last = self._contexts[len(outputs) - 1]
        return logs.of_global_batch(self._model, outputs, fractions, last)


class PredictStep(_ModelStep):
    """A `predict_step`, whose result is the outputs for the global batch."""

    def _run(self, shard: Tree, size: Any, context: StepContext) -> Tree:
        del size, context
        return self._model.predict_step(shard)

    def merge(self, outputs: list[Tree], fractions: list, sizes: list) -> Tree:
        """See `ReplicaStep`."""
        return keras.tree.map_structure(
            lambda *leaves: _of_global_batch(leaves, fractions, sizes), *outputs
        )


def _of_global_batch(leaves: tuple, fractions: list, sizes: list) -> Any:
    if leaves[0] is None:
        return None
    if leaves[0].shape.rank == 0:  # as of a metric, a mean over samples
        return logs.weighted_mean(leaves, fractions)
    # What a replica without samples predicted of its stand-in is dropped.
    return _concatenated(
        [
            leaf if size is None else _if_any(leaf, size)
            for leaf, size in zip(leaves, sizes, strict=True)
        ]
    )


def _if_any(leaf: Any, size: tf.Tensor) -> Any:
    length = tf.cast(rows.length_of(leaf), tf.int64)
    return rows.take(leaf, tf.zeros_like(length), tf.sign(size) * length)


def joined(parts: list[Tree]) -> Tree:
    """Joins trees of tensors of shape `(batch, ...)` along the first axis."""
    return keras.tree.map_structure(
        lambda *leaves: _concatenated(leaves), *parts
    )


def _concatenated(leaves: Sequence[Any]) -> Any:
    if len(leaves) == 1:
        return leaves[0]
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    return tf.concat(leaves, 0)
