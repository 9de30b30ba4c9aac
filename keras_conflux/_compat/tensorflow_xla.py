"""Operations that XLA alone knows."""

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from keras_conflux._compat import tensorflow_graphs


def xla_all_reduce(tensor: tf.Tensor, count: int, op: str) -> tf.Tensor:
    """All-reduces inside an XLA program that runs on `count` devices.

    Args:
        tensor: float16, bfloat16, float32 or int32.
        count: How many devices.
        op: `"Add"`, `"Mul"`, `"Min"` or `"Max"`.
    """
    # The mode "CrossReplica" gives each replica back its own tensor, as
    # TensorFlow compiles a program for each.
    reduced = gen_xla_ops.xla_all_reduce(
        tensor, [list(range(count))], op, "CrossReplicaAndPartition"
    )
    tensorflow_graphs.must_run(reduced)
    return reduced
