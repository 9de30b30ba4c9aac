"""The variables of the strategy: with equal copies, or such as are added."""

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute import values
from tensorflow.python.trackable import base

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat.tensorflow_internals import own_variable


class OfReplicas:
    """Conversions of a `tf.Variable`, which one with copies lacks."""

    def _get_replica(self: Any, replica_id: int) -> Any:
        assert_of_running(self)
        return super()._get_replica(replica_id)

    def __bool__(self: Any) -> bool:
        return bool(self.read_value())

    def __int__(self: Any) -> int:
        return int(self.read_value())

    def __float__(self: Any) -> float:
        return float(self.read_value())

    def __complex__(self: Any) -> complex:
        return complex(self.read_value())

    def __array__(self: Any, dtype: Any = None, copy: Any = None) -> Any:
        del copy  # a copy is made in any case
        return np.array(self.read_value().numpy(), dtype)


class MirroredVariable(OfReplicas, values.MirroredVariable):
    """A variable whose copies are equal."""

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if isinstance(value, OfReplicas):  # its own copy's
            value = value.read_value()
        if isinstance(value, list | tuple | np.ndarray | np.number):
            # TensorFlow takes all but tensors for equal on all replicas.
            value = tf.convert_to_tensor(value, self.dtype)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if self.aggregation != first or not tf.is_tensor(value):
            return super()._update_replica(update_fn, value, **kwargs)
        # TensorFlow would pause all replicas for it.
        value = self.distribute_strategy.extended.of_first_replica(value)
        return tf.distribute.get_replica_context()._update(
            self, update_fn, args=(value,), kwargs=kwargs, group=True
        )

    def _update_cross_replica(
        self, update_fn: Any, value: Any, **kwargs: Any
    ) -> Any:
        return super()._update_cross_replica(update_fn, whole(value), **kwargs)


class OnRead(OfReplicas, values.SyncOnReadVariable):
    """A variable whose copies are reduced when it is read.

    Where the copies of several processes add up to its value, each process
    holds the value besides, so that one alone can read it, at any time. The
    programs that write copies add them up at their end.
    """

    conflux_whole: tf.Variable | None = None
    """The variable with the sum over all processes, in each of them."""
    conflux_is_local: bool = False
    """Whether it is read as the sum of the copies in this process."""

    def _get_cross_replica(self) -> Any:
        if self.conflux_whole is not None:
            return self.conflux_whole.read_value()
        if self.conflux_is_local:
            return tf.add_n([copy.read_value() for copy in self.values])
        return super()._get_cross_replica()

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and self.conflux_whole is not None:
            raise NotImplementedError(
                "Replicas that run eagerly add up nothing between processes. "
                f"Received: an update of {self.name}. Call `strategy.run` in a "
                "`tf.function`."
            )
        return super()._update_replica(update_fn, value, **kwargs)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.distribute.in_cross_replica_context():
            assert_of_running(self, is_written=True)
        result = super().assign(value, *args, **kwargs)
        if self.aggregation == tf.VariableAggregation.SUM and self._is_whole:
            # TensorFlow gives each copy an equal part, which integers may not
            # have: half of a count of 1 is 0.
            set_sum(self, value)
        return result

    @property
    def _is_whole(self) -> bool:
        """Whether all copies are written here, and not one replica's."""
        with distribute_lib.enter_or_assert_strategy(self.distribute_strategy):
            is_outside = tf.distribute.in_cross_replica_context()
        return is_outside and distribute_lib.get_update_replica_id() is None

    def _gather_saveables_for_checkpoint(self) -> Any:
        if self.aggregation != tf.VariableAggregation.SUM:
            return super()._gather_saveables_for_checkpoint()
        name = self._common_name
        return {base.VARIABLE_VALUE_KEY: lambda name=name: _Sum(self, name)}


class _Sum(values._SyncOnReadSaveable):
    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        (value,) = restored_tensors
        return tf.group(*set_sum(self._sync_on_read_variable, value))


def set_sum(variable: Any, value: Any) -> list[Any]:
    """Makes the copies add up to a value; returns the operations."""
    first, *others = variable.values
    value = tf.cast(value, first.dtype)
    mine = value
    if variable.distribute_strategy.communicator.rank(0) > 0:
        mine = tf.zeros_like(value)
    found = [first.assign(mine)]
    found += [copy.assign(tf.zeros_like(mine)) for copy in others]
    if variable.conflux_whole is not None:
        found.append(variable.conflux_whole.assign(value))
    return found


class InParts(OfReplicas):
    """A variable of which each device has a part. It is used whole."""

    layout: Any
    """How the parts make the whole."""
    assigned: Any = None
    """Of several processes: the sum and the norm of the last whole value that
    it was assigned outside of replicas."""


def whole(value: Any) -> Any:
    """Returns the value of a variable in parts, and all else as it is."""
    return value.read_value() if isinstance(value, InParts) else value


def some_in_parts(*given: Any) -> bool:
    """Whether a function of these runs once, on wholes, and not by copies."""
    return any(isinstance(each, InParts) for each in tf.nest.flatten(given))


_OURS = {
    values.MirroredVariable: MirroredVariable,
    values.SyncOnReadVariable: OnRead,
}


def make_ours(variable: Any) -> None:
    """Makes a variable that TensorFlow has made one of the strategy's."""
    if type(variable) not in _OURS:
        return
    variable.__class__ = _OURS[type(variable)]
    is_sum = variable.aggregation == tf.VariableAggregation.SUM
    spans = variable.distribute_strategy.communicator.spans_processes
    if not (isinstance(variable, OnRead) and is_sum and spans):
        return
    first = variable.values[0]
    with tf.init_scope():
        if tf.executing_eagerly():  # not in a `tf.Graph` of the user's
            none = tf.zeros(first.shape, first.dtype)
            variable.conflux_whole = own_variable(first.device, none)
    if tf.executing_eagerly():  # else the program that makes it does, later
        set_sum(variable, first.read_value())


def places(destinations: Any) -> Any:
    """Returns a value that stands for the devices of a destination.

    TensorFlow asks a destination for its truth value, to see that it has one.
    """
    if isinstance(destinations, OfReplicas):
        return values.Mirrored(destinations.values)
    return destinations


def assert_of_running(variable: Any, is_written: bool = False) -> None:
    """Raises if what runs is of another strategy.

    A replica may read copies of one that cuts nothing, on the same devices.
    """
    own, running = variable.distribute_strategy, tf.distribute.get_strategy()
    if own is running or not hasattr(running.extended, "of_first_replica"):
        return
    ours, theirs = (each.extended.worker_devices for each in (own, running))
    if ours != theirs or is_written or own.shard is not None:
        wanted = running if own.shard is None and running.shard else own
        options = str(wanted).partition("]")[2]
        raise StrategyError(
            f"The variable {variable.name!r} is replicated on {own}, and this "
            f"runs on {running}. Models, optimizers, metrics and batches of a "
            "step have the same devices and options: write `with keras_conflux."
            f"replicate(devices={len(wanted.devices)}{options}:`, or the scope "
            "of a distribution, around all of them, or give each call the "
            "same `devices`."
        )
