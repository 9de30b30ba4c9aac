"""All-reduces between CPU devices, in a graph."""

from collections.abc import Sequence

import tensorflow as tf

from keras_conflux._cluster import instance_keys
from keras_conflux._communication.transports.ops import Op
from keras_conflux._compat.tensorflow_internals import own_variable
from keras_conflux._devices.device import Device


class CpuRing:
    """TensorFlow's ring, with keys that are drawn while the op runs.

    TensorFlow finds the partners of a collective by an instance key. Here it
    comes from a counter variable on each device. So shapes may change from
    call to call, and an op may sit in a branch of `tf.cond`. In one process a
    failed step leaves no key behind that a later one could meet; several,
    which do not recover, use keys again (`instance_keys.py`).

    Args:
        devices: One device per replica of this process, in replica order.
        size: The number of replicas of all processes.
        group_key: Tells this group of devices from others.
        lane: 0, or 1 for the keys of a second ring of the group.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        size: int,
        group_key: int,
        lane: int = 0,
    ) -> None:
        self._size = size
        self._group_key = group_key
        self._lane = lane
        self._spans_processes = size > len(devices)
        first = lane << 30  # far from the keys of the other ring
        self._counters = [own_variable(device, first) for device in devices]

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        del call
        counter = self._counters[index]
        # It waits for the collective before, and for nothing else: of two
        # reasons to wait Grappler drops one, and later perhaps the other.
        if self._spans_processes:
            size = instance_keys.size_of(tensor)
            key = instance_keys.next_key(
                counter, size, tensor.dtype, self._lane
            )
        else:
            key = counter.assign_add(1, read_value=True)
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
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

    def recover(self) -> None:
        """Levels the counters after a step that failed half-way."""
        latest = max(int(counter.numpy()) for counter in self._counters)
        for counter in self._counters:
            counter.assign(latest + 1)
