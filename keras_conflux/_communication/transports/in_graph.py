"""All-reduces in a graph, and in eager mode: between CPU devices, or GPUs."""

import functools
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import tensorflow as tf

from keras_conflux._cluster.agreement import next_key
from keras_conflux._common.trees import size_of
from keras_conflux._communication.transports.ops import Op
from keras_conflux._compat.tensorflow_internals import own_variable
from keras_conflux._devices.device import Device
from keras_conflux._graphs import rewriting


class Transport(Protocol):
    """Carries a tensor among the devices of a group."""

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`; `call` is a key of the call."""
        ...


class CpuRing:
    """TensorFlow's ring, with keys that are drawn while the op runs.

    Keys come from a counter variable on each device. So shapes may change from
    call to call, and an op may sit in a branch of `tf.cond`. Several processes,
    of which none survives a failed step, use keys again (`next_key`). The ring
    in lane 1 has keys of its own: its collectives run earlier than traced.
    """

    def __init__(
        self, devices: Sequence[Device], size: int, group: int, lane: int = 0
    ) -> None:
        self._size = size
        self._group_key = group
        self._lane = lane
        self._spans_processes = size > len(devices)
        first = lane << 30  # far from the keys of the other ring
        self._counters = [own_variable(device, first) for device in devices]

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        counter = self._counters[index]
        # It waits for the collective before, and for nothing else: of two
        # reasons to wait Grappler drops one, and later perhaps the other.
        if self._spans_processes:
            key = next_key(counter, size_of(tensor), tensor.dtype, self._lane)
        else:
            key = counter.assign_add(1, read_value=True)
        flat = tf.raw_ops.CollectiveReduceV2(
            input=tf.reshape(tensor, [-1]),
            group_size=self._size,
            group_key=self._group_key,
            instance_key=tf.convert_to_tensor(key),
            # A resource of the replica's own: without one TensorFlow runs the
            # collectives of a function one after another, replica by replica.
            ordering_token=[counter.handle],
            merge_op=op.merge_op,
            final_op="Id",
            communication_hint="ring",
        )
        return in_shape_of(tensor, flat)

    def level(self) -> Any:
        """Returns an operation after which all counters are equal, and new."""
        latest = tf.reduce_max([each.read_value() for each in self._counters])
        return tf.group(*[each.assign(latest + 1) for each in self._counters])


def all_reduce_eagerly(tensor: tf.Tensor, op: Op, device: str) -> tf.Tensor:
    """Pauses all replicas and reduces their tensors on one device."""

    def reduce_all(strategy: tf.distribute.Strategy, values: Any) -> Any:
        tensors = strategy.experimental_local_results(values)
        with tf.device(device):
            reduced = functools.reduce(op.of_two, tensors)
        return strategy.experimental_distribute_values_from_function(
            lambda _: reduced
        )

    context = tf.distribute.get_replica_context()
    # Replicas that gave the same object would be taken for one (`regroup`).
    return context.merge_call(reduce_all, args=(tf.identity(tensor),))


class Nccl:
    """TensorFlow's raw NCCL op, one per replica, which share a name."""

    def __init__(self, size: int, group_key: int) -> None:
        self._size = size
        self._group_key = group_key

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        dtype = tensor.dtype
        if dtype == tf.bfloat16:  # the raw op has no kernel for it
            tensor = tf.cast(tensor, tf.float32)
        reduced = tf.raw_ops.NcclAllReduce(
            input=tensor,
            reduction=op.nccl_op,
            num_devices=self._size,
            shared_name=f"conflux_{self._group_key}_{call}",
        )
        rewriting.must_run(reduced)
        return tf.cast(reduced, dtype)


class NcclBetweenProcesses:
    """TensorFlow's collective over NCCL, with keys drawn while the op runs.

    The key is drawn on the host. The variable that orders the collectives lies
    on the GPU, because TensorFlow runs an op where its resources are.
    """

    def __init__(self, devices: Sequence[Device], size: int, key: int) -> None:
        self._size = size
        self._group_key = key
        self._counters = [own_variable("CPU:0", 0) for _ in devices]
        self._tokens = [own_variable(device, 0.0) for device in devices]

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        dtype = tensor.dtype
        if dtype == tf.int32:  # which TensorFlow keeps on the host
            tensor = tf.cast(tensor, tf.int64)
        counter, token = self._counters[index], self._tokens[index]
        with tf.device("CPU:0"):
            key = next_key(counter, size_of(tensor), tensor.dtype)
        # It waits for the collective before, and for nothing else, so that
        # Grappler keeps the order. See `CpuRing`.
        turn = token.assign(0.0, read_value=False)
        with tf.control_dependencies([turn]):
            flat = tf.raw_ops.CollectiveReduceV2(
                input=tf.reshape(tensor, [-1]),
                group_size=self._size,
                group_key=self._group_key,
                instance_key=key,
                ordering_token=[token.handle],
                merge_op=op.merge_op,
                final_op="Id",
                communication_hint="nccl",
            )
        return tf.cast(in_shape_of(tensor, flat), dtype)


def in_shape_of(tensor: tf.Tensor, flat: tf.Tensor) -> tf.Tensor:
    """Returns what was reduced flat: keys come back for another shape."""
    return tf.ensure_shape(tf.reshape(flat, tf.shape(tensor)), tensor.shape)
