"""All-reduces between GPUs, in a graph."""

import tensorflow as tf

from keras_conflux._communication.transports.ops import Op
from keras_conflux._compat import tensorflow_graphs


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
        tensorflow_graphs.must_run(reduced)
        return tf.cast(reduced, dtype)

    def recover(self) -> None:
        """Does nothing: a failed step leaves no state behind."""
