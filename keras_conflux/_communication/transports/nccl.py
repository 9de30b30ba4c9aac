"""All-reduces between GPUs, in a graph, of one process or of several."""

from collections.abc import Sequence

import tensorflow as tf

from keras_conflux._cluster import instance_keys
from keras_conflux._communication.transports.ops import Op
from keras_conflux._compat.tensorflow_internals import own_variable
from keras_conflux._devices.device import Device
from keras_conflux._graphs import rewriting


class Nccl:
    """TensorFlow's raw NCCL op, one per replica, which share a name.

    Args:
        size: The number of replicas.
        group_key: Tells this group of devices from others.
    """

    def __init__(self, size: int, group_key: int) -> None:
        self._size = size
        self._group_key = group_key

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        del index
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

    def recover(self) -> None:
        """Does nothing: a failed step leaves no state behind."""


class NcclBetweenProcesses:
    """TensorFlow's collective over NCCL, with keys drawn while the op runs.

    The key is drawn on the host. The variable that orders the collectives lies
    on the GPU, because TensorFlow runs an op where its resources are.

    Args:
        devices: One device per replica of this process, in replica order.
        size: The number of replicas of all processes.
        group_key: Tells this group of devices from others.
    """

    def __init__(
        self, devices: Sequence[Device], size: int, group_key: int
    ) -> None:
        self._size = size
        self._group_key = group_key
        self._counters = [own_variable("CPU:0", 0) for _ in devices]
        self._tokens = [own_variable(device, 0.0) for device in devices]

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        del call
        dtype = tensor.dtype
        if dtype == tf.int32:  # which TensorFlow keeps on the host
            tensor = tf.cast(tensor, tf.int64)
        counter, token = self._counters[index], self._tokens[index]
        size = instance_keys.size_of(tensor)
        with tf.device("CPU:0"):
            key = instance_keys.next_key(counter, size, tensor.dtype)
        # It waits for the collective before, and for nothing else, so that
        # Grappler keeps the order. See `CpuRing`.
        turn = token.assign(0.0, read_value=False)
        with tf.control_dependencies([turn]):
            reduced = tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                group_size=self._size,
                group_key=self._group_key,
                instance_key=key,
                ordering_token=[token.handle],
                merge_op=op.merge_op,
                final_op="Id",
                communication_hint="nccl",
            )
        return tf.cast(reduced, dtype)

    def recover(self) -> None:
        """Does nothing: processes cannot recover from a failed step."""
