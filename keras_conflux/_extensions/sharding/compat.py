"""A variable of TensorFlow of which each device holds a part."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute import values

from keras_conflux._compat import keras_optimizers
from keras_conflux._compat.replicated_variables import InParts
from keras_conflux._compat.replicated_variables import assert_of_running
from keras_conflux._extensions.sharding import between_processes
from keras_conflux._extensions.sharding import whole_values
from keras_conflux._extensions.sharding.layout import Layout
from keras_conflux._replication.replica_context import rank_as_tensor


def apart(part: tf.Tensor) -> tf.Tensor:
    """Returns a part of a tensor in memory of its own, outside of graphs.

    TensorFlow cuts along the first axis without copying. A variable that took
    such a part would keep the whole tensor in memory.
    """
    return tf.raw_ops.DeepCopy(x=part) if tf.executing_eagerly() else part


class ShardedVariable(InParts, values.DistributedVariable):
    """A variable that is flat, filled up and cut: a part on each device.

    It is read and written whole, inside of replicas and outside, so nothing
    that uses variables has to know. Code that works on parts asks for `part`.

    Args:
        strategy: The strategy of the variable.
        parts: A variable for each replica, of one axis.
        layout: The layout of the parts in the whole.
    """

    def __init__(
        self, strategy: Any, parts: Sequence[tf.Variable], layout: Layout
    ) -> None:
        super().__init__(strategy, parts, tf.VariableAggregation.NONE)
        self.layout = layout

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole."""
        return tf.TensorShape(self.layout.shape)

    def get_shape(self) -> tf.TensorShape:
        """Returns the shape of the whole."""
        return self.shape

    @property
    def part(self) -> tf.Variable:
        """The part of the running replica."""
        found: Any = self._get_on_device_or_primary()
        return found

    def read_value(self) -> tf.Tensor:
        """Returns the whole value."""
        if self._in_replica():
            return whole_values.gathered(self)
        if len(self._values) < self.layout.count:  # others have the rest
            if keras_optimizers.stateless_scope():  # Keras asks for shapes
                return tf.compat.v1.placeholder(self.dtype, self.layout.shape)
            return tf.convert_to_tensor(self.numpy())
        flat = tf.concat([each.read_value() for each in self._values], 0)
        return self.layout.whole(flat)

    value = _get = read_value
    _get_cross_replica = _as_graph_element = read_value

    def numpy(self) -> np.ndarray:
        """Returns the whole value, whose parts are joined on the host."""
        if not tf.executing_eagerly():
            raise NotImplementedError(
                f"{self.name} is sharded, and its whole value is not known "
                "where a `tf.function` is traced outside of replicas. Read it "
                "before the function, or inside of a replica."
            )
        own = np.concatenate([each.numpy() for each in self._values])
        flat = between_processes.joined(self, own)
        return flat[: self.layout.size].reshape(self.layout.shape)

    def _write(self, method: str, value: Any, *_: Any, **options: Any) -> Any:
        """Writes a whole value, of which each device gets its part."""
        if self._in_replica():
            part = self.layout.part_of(self._as_tensor(value), rank_as_tensor())
            read = options.get("read_value", True)
            return getattr(self.part, method)(part, read_value=read)
        # On the host, unless it is on a device: each device gets its part.
        is_tensor = isinstance(value, tf.Tensor | tf.Variable)
        device = None if is_tensor else "CPU:0"
        with tf.device(device):
            whole = self._as_tensor(value)
            between_processes.note_whole(self, whole, method)
            parts = self.layout.parts(whole)
        begin = self.distribute_strategy.communicator.rank(0)
        for own, part in zip(self._values, parts[begin:], strict=False):
            with tf.device(own.device):
                getattr(own, method)(apart(part), read_value=False)
        return self

    assign: Any = functools.partialmethod(_write, "assign")
    assign_add: Any = functools.partialmethod(_write, "assign_add")
    assign_sub: Any = functools.partialmethod(_write, "assign_sub")

    def scatter_add(self, sparse_delta: Any, *_: Any, **__: Any) -> Any:
        """Adds some rows."""
        return self.assign_add(tf.convert_to_tensor(sparse_delta))

    def scatter_sub(self, sparse_delta: Any, *_: Any, **__: Any) -> Any:
        """Subtracts some rows."""
        return self.assign_sub(tf.convert_to_tensor(sparse_delta))

    def scatter_update(self, sparse_delta: Any, *_: Any, **__: Any) -> Any:
        """Sets some rows."""
        places = tf.expand_dims(sparse_delta.indices, -1)
        now, rows = self.read_value(), sparse_delta.values
        whole = tf.tensor_scatter_nd_update(now, places, rows)
        return self.assign(whole)

    def _as_tensor(self, value: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(value, dtype=self.dtype)
        if not self.shape.is_compatible_with(tensor.shape):
            raise ValueError(
                f"{self.name} has the shape {self.shape}. Received a value "
                f"of shape {tensor.shape}."
            )
        return tensor

    def _in_replica(self) -> bool:
        if not distribute_lib.has_strategy():
            return False
        assert_of_running(self)
        return distribute_lib.get_replica_context() is not None

    def _dense_var_to_tensor(
        self,
        dtype: tf.DType | None = None,
        name: str | None = None,
        as_ref: bool = False,
    ) -> Any:
        if as_ref or (dtype is not None and dtype != self.dtype):
            return NotImplemented
        return self.read_value()

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, *given: Any, **options: Any) -> Any:
        if not self.trainable:  # an optimizer's, which is not served
            return super()._export_to_saved_model_graph(*given, **options)
        raise NotImplementedError(
            f"{self.name} is sharded, and a program that loads the model would "
            "not have its parts. Call `model.export`, or, before a function is "
            "traced to be saved, `keras_conflux.unreplicate(model)`."
        )
