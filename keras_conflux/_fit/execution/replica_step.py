"""What each replica does with its part of a batch, and what comes of it."""

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
from keras_conflux._replication.strategy import replica_index


class Work(Protocol):
    """One step of all replicas."""

    name: str
    """What a warning calls it."""

    def on_replica(self, part: Tree, share: Any, size: Any) -> Tree:
        """Does a replica's part. Traced once a replica, in replica order.

        Args:
            part: The replica's part of the global batch.
            share: A scalar: its number of samples over the global batch's.
            size: Its number of samples, which may be 0; `None` if it cannot.
        """
        ...

    def after_steps(self, share: Any) -> None:
        """Does what once after many steps of the same share will do.

        Traced once a replica, after `on_replica`.
        """
        ...

    def merge(self, outputs: list[Tree], shares: list, sizes: list) -> Tree:
        """Makes one result of what the replicas returned."""
        ...


class _OfModel:
    """Runs something of a model, and sees to what its layers keep of it."""

    def __init__(self, model: keras.Model) -> None:
        self.name = model.name
        self._model = model
        self._programs: dict[int, step_context.Program] = {}

    def on_replica(self, part: Tree, share: Any, size: Any) -> Tree:
        """See `Work`."""
        eager = tf.executing_eagerly()
        graph = None if eager else tf.compat.v1.get_default_graph()
        running = step_context.Program(self.name, share=share, graph=graph)
        self._programs[replica_index()] = running
        with step_context.running(running):
            output = self._run(part, size, running)
            layer_state.reduce_states(self._model, running)
        return output

    def _run(
        self, part: Tree, size: Any, running: step_context.Program
    ) -> Tree:
        raise NotImplementedError

    def after_steps(self, share: Any) -> None:
        """See `Work`."""
        layer_state.average(self._programs[replica_index()], share)


class Step(_OfModel):
    """A `train_step` or `test_step`, whose result is the logs."""

    def __init__(self, model: keras.Model, step: Callable) -> None:
        super().__init__(model)
        self._step = step

    def _run(
        self, part: Tree, size: Any, running: step_context.Program
    ) -> Tree:
        before = logs.metric_state(self._model, size)
        with logs.noting_results(self._model) as noted:
            output = self._step(part)
        running.named = logs.metrics_by_name(output, noted)
        logs.restore(before, size, running)
        return output

    def merge(self, outputs: list[Tree], shares: list, sizes: list) -> Tree:
        """See `Work`."""
        del sizes
        last = self._programs[len(outputs) - 1]
        return logs.of_global_batch(self._model, outputs, shares, last)


class Prediction(_OfModel):
    """A `predict_step`, whose result is the outputs for the global batch."""

    def _run(
        self, part: Tree, size: Any, running: step_context.Program
    ) -> Tree:
        del size, running
        return self._model.predict_step(part)

    def merge(self, outputs: list[Tree], shares: list, sizes: list) -> Tree:
        """See `Work`."""
        return keras.tree.map_structure(
            lambda *leaves: _of_global_batch(leaves, shares, sizes), *outputs
        )


def _of_global_batch(leaves: tuple, shares: list, sizes: list) -> Any:
    if leaves[0] is None:
        return None
    if leaves[0].shape.rank == 0:  # as of a metric, a mean over samples
        return logs.weighted_mean(leaves, shares)
    # What a replica without samples predicted of its stand-in is dropped.
    return _concat(
        [
            leaf if size is None else _if_any(leaf, size)
            for leaf, size in zip(leaves, sizes, strict=True)
        ]
    )


def _if_any(leaf: Any, size: tf.Tensor) -> Any:
    length = tf.cast(rows.length_of(leaf), tf.int64)
    return rows.rows(leaf, tf.zeros_like(length), tf.sign(size) * length)


def joined(parts: list[Tree]) -> Tree:
    """Joins trees of tensors of shape `(batch, ...)` along the first axis."""
    return keras.tree.map_structure(lambda *leaves: _concat(leaves), *parts)


def _concat(leaves: Sequence[Any]) -> Any:
    if len(leaves) == 1:
        return leaves[0]
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    return tf.concat(leaves, 0)
