"""All-reduces one tensor among the devices of a strategy.

Each replica calls `all_reduce` for itself while its program is traced; the
calls of all replicas, matched by their order, are one collective. Everything
that replicas exchange goes through here.
"""

import itertools
import threading
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._communication import float_order
from keras_conflux._communication.transports import eager
from keras_conflux._communication.transports.cpu import CpuRing
from keras_conflux._communication.transports.nccl import Nccl
from keras_conflux._communication.transports.xla import XlaNccl
from keras_conflux._compat import tensorflow_internals
from keras_conflux._devices.device import Device

# Far from the keys that TensorFlow's own strategies count up from 1.
_group_keys = itertools.count(1 << 20)


class Communicator:
    """The collective channel of one tuple of devices.

    It chooses the transport, and compares the calls of the replicas while
    they are traced.

    Args:
        devices: One device per replica, all of one kind, in replica order.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.on_gpu = self.devices[0].kind == "GPU"
        self._calls = [0] * len(self.devices)
        self._compared = [0] * len(self.devices)
        self._signatures: list[Any] = []
        self.lock = threading.RLock()
        """Held while replicas are traced or run: two programs at once would
        meet each other's collectives."""
        group_key = next(_group_keys)
        self._in_xla = XlaNccl(self.size, group_key)
        with tf.init_scope():
            self._in_graph = (
                Nccl(self.size, group_key)
                if self.on_gpu
                else CpuRing(self.devices, group_key)
            )
            in_graphs = not tf.config.functions_run_eagerly()
            if self.size > 1 and not self.on_gpu and in_graphs:
                self._warm_up()

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.devices)

    @property
    def supports_xla(self) -> bool:
        """Whether XLA programs can use it: not on several CPU devices."""
        return self.size == 1 or self.on_gpu

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: str, in_xla: bool = False
    ) -> tf.Tensor:
        """Returns the reduction of every replica's `tensor`.

        Args:
            tensor: Dense, of a shape and dtype that all replicas share.
                bfloat16, half, float32, float64, int32 or int64.
            index: The calling replica.
            op: `"sum"`, `"product"`, `"min"` or `"max"`.
            in_xla: Whether what is traced becomes part of an XLA program.
        """
        if self.size == 1 or tensor.shape.num_elements() == 0:
            return tf.identity(tensor)
        if tf.executing_eagerly():
            return eager.all_reduce(tensor, op, self.devices[0])
        is_extreme = op in ("min", "max")
        if self.on_gpu and is_extreme and tensor.dtype.is_floating:
            integers = float_order.to_ordered_integers(tensor, op)
            reduced = self.all_reduce(integers, index, op, in_xla)
            return float_order.to_floats(reduced, tensor.dtype)
        if in_xla:
            self._calls[index] += 1
            call = self._calls[index]
            return self._in_xla.all_reduce(tensor, index, op, call)
        return self._reduce_in_graph(tensor, index, op)

    def calls(self, index: int) -> int:
        """Returns how many calls of a replica have been traced so far."""
        return self._calls[index]

    def assert_same_call(
        self, index: int, signature: Any, check: Callable[[Any, Any, int], None]
    ) -> None:
        """Compares what this replica is about to reduce with replica 0's.

        Args:
            index: The calling replica. Replicas are traced one after another,
                replica 0 first.
            signature: What describes the call.
            check: Called with replica 0's signature, this one and the index;
                raises if they differ.
        """
        position = self._compared[index]
        self._compared[index] += 1
        if index == 0:
            self._signatures.append(signature)
        elif position < len(self._signatures):
            check(self._signatures[position], signature, index)

    def checked_trace(self, run: Callable[[], Any]) -> Any:
        """Calls `run`, which traces all replicas, and checks their calls.

        Raises:
            ReplicaMismatchError: If replicas made different numbers of calls.
        """
        calls = self._calls
        try:
            result = run()
            if len(set(calls)) > 1:
                few, many = calls.index(min(calls)), calls.index(max(calls))
                raise ReplicaMismatchError(
                    f"Replica {many} makes {calls[many] - calls[few]} more "
                    f"collective call(s) than replica {few} and would wait "
                    "for it forever. Call `allreduce` and its kin on every "
                    "replica, in the same order, not under "
                    "`if replica().index == ...`. If a `tf.function` that the "
                    "step calls makes variables, build the model before: "
                    "TensorFlow traces such a function twice."
                )
            return result
        finally:
            self._reset_counts()

    def recover(self) -> None:
        """Makes the channel usable after a step that failed half-way."""
        self._reset_counts()
        self._in_graph.recover()

    def _reset_counts(self) -> None:
        self._calls[:] = [max(self._calls)] * self.size
        self._compared[:] = [0] * self.size
        self._signatures.clear()

    def _warm_up(self) -> None:
        """Runs a first collective, in a step that cannot fail.

        TensorFlow cannot repair a group whose first collective is cancelled.
        """

        @tf.function
        def all_devices() -> None:
            for index, _ in enumerate(self.devices):
                self.all_reduce(tf.zeros(()), index, "sum")

        all_devices()
        self._reset_counts()

    def _reduce_in_graph(
        self, tensor: tf.Tensor, index: int, op: str
    ) -> tf.Tensor:
        if tensorflow_internals.in_replica_loop():
            raise NotImplementedError(
                "A collective inside a `tf.while_loop` (or a Python loop over "
                "tensors) of the replica's program would wait forever: "
                "TensorFlow does not match the loops of different replicas. "
                "Put the loop around the step, or reduce after the loop."
            )
        self._calls[index] += 1
        call = self._calls[index]
        with tf.device(self.devices[index]):
            if tensor.shape.is_fully_defined():
                return self._in_graph.all_reduce(tensor, index, op, call)
            # It may turn out empty, on which TensorFlow 2.21's ring sometimes
            # ends the process; so one element goes along.
            flat = tf.reshape(tensor, [-1])
            padded = tf.concat([flat, tf.zeros([1], tensor.dtype)], 0)
            reduced = self._in_graph.all_reduce(padded, index, op, call)[:-1]
            return tf.ensure_shape(
                tf.reshape(reduced, tf.shape(tensor)), tensor.shape
            )
