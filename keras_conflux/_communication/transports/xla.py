"""All-reduces inside XLA programs, between GPUs."""

import tensorflow as tf

from keras_conflux._communication.transports.op_names import MERGE_OPS
from keras_conflux._compat import tensorflow_internals


class XlaNccl:
    """Collectives that XLA lowers to NCCL's.

    XLA matches them by their order in the programs of the group.

    Args:
        size: The number of replicas.
        group_key: Tells this group of devices from others.
    """

    def __init__(self, size: int, group_key: int) -> None:
        self._size = size
        self._group_key = group_key

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: str, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        del call
        if op in ("sum", "product"):
            return self._lowered(tensor, op)
        if tensor.dtype == tf.int32:
            # Only CollectiveReduceV2 says which devices the program is for,
            # and it supports sums and products alone. So it sums an empty
            # tensor.
            self._lowered(tf.zeros([0], tensor.dtype), "sum")
            return tensorflow_internals.xla_all_reduce(
                tensor, self._size, MERGE_OPS[op]
            )
        # That other op does not support int64. So all tensors are gathered by
        # a sum of blocks, of which each replica fills its own.
        blocks = [tf.zeros_like(tensor)] * self._size
        blocks[index] = tensor
        gathered = self._lowered(tf.stack(blocks), "sum")
        reduce = tf.reduce_min if op == "min" else tf.reduce_max
        return reduce(gathered, axis=0)

    def _lowered(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self._size,
            group_key=self._group_key,
            instance_key=1,
            ordering_token=[],
            merge_op=MERGE_OPS[op],
            final_op="Id",
            communication_hint="nccl",
        )
