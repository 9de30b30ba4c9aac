"""The replica that runs here: which it is, and its channel to the others."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._common.contexts import Setting
from keras_conflux._common.waiting import DaemonCall
from keras_conflux._communication.tree_collectives import ReplicaCollectives
from keras_conflux._compat import keras_variables
from keras_conflux._compat.replicated_extended import ReplicatedExtended
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._replication import steps


def in_replica() -> bool:
    """Whether a replica of a `ReplicatedStrategy` is running here."""
    context = tf.distribute.get_replica_context()
    return context is not None and isinstance(
        context.strategy.extended, ReplicatedExtended
    )


_on_whole_batch: Setting[Any] = Setting(None)
on_whole_batch = _on_whole_batch.to
"""Runs a step once in this thread, on the whole batch, as on one device.

It reads the first copy of a variable of a strategy, and writes all.
"""


def whole_batch_strategy() -> Any:
    """Returns the strategy of the model whose step runs once here, if any."""
    return None if in_replica() else _on_whole_batch.get()


def outside_of_replicas(function: Callable[[], Any]) -> Any:
    """Calls a function of a replica, in another thread if eager."""
    if not in_replica() or not tf.executing_eagerly():
        return function()
    return outside_of_strategies(function)


def outside_of_strategies(function: Callable[[], Any]) -> Any:
    """Calls a function where no scope of a strategy is open."""
    if not tf.distribute.has_strategy():
        return function()
    call = keras_variables.with_this_threads_state(function)
    return DaemonCall(call).result()


def replica_rank() -> Any:
    """Returns the position of the running replica among all processes'.

    A trace that asks for it serves this replica, or turn, alone.
    """
    return _channel().rank_as_constant(replica_index())


def rank_as_tensor() -> Any:
    """Returns `replica_rank`, as a tensor in compiled steps of replicas."""
    step = steps.current()
    if step is not None and step.turns is not None:
        return step.turns.rank
    ranks = step and step.compiled and step.compiled.rank
    if ranks is None:
        return replica_rank()
    return ranks.values[replica_index()].read_value()


def replica_collectives() -> ReplicaCollectives:
    """Returns the collectives of the running replica. There must be one."""
    in_xla = steps.in_xla()
    return ReplicaCollectives(
        _channel(), replica_index(), in_xla, rank_as_tensor, has_samples
    )


def has_samples() -> tf.Tensor | None:
    """Whether this replica has samples, or `None` if all replicas must."""
    step = steps.current_fit_step()
    return step.batch_fraction > 0 if step and step.may_be_empty else None


def _channel() -> Any:
    """Returns the channel of the running replica, or of its turn."""
    step = steps.current()
    if step is not None and step.turns is not None:
        return step.turns
    return tf.distribute.get_strategy().communicator
