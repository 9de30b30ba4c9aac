"""All-reduces in eager mode, where replicas run one after another."""

import functools
import operator
from typing import Any

import tensorflow as tf

_OPS = {
    "sum": operator.add,
    "product": operator.mul,
    "min": tf.minimum,
    "max": tf.maximum,
}


def all_reduce(tensor: tf.Tensor, op: str, device: str) -> tf.Tensor:
    """Pauses all replicas and reduces their tensors on one device.

    Args:
        tensor: The calling replica's.
        op: `"sum"`, `"product"`, `"min"` or `"max"`.
        device: Where to reduce.
    """

    def reduce_all(strategy: tf.distribute.Strategy, values: Any) -> Any:
        tensors = strategy.experimental_local_results(values)
        with tf.device(device):
            reduced = functools.reduce(_OPS[op], tensors)
        return strategy.experimental_distribute_values_from_function(
            lambda _: reduced
        )

    context = tf.distribute.get_replica_context()
    # Replicas that gave the same object would be taken for one (`regroup`).
    return context.merge_call(reduce_all, args=(tf.identity(tensor),))
