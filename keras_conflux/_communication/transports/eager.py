"""All-reduces in eager mode, where replicas run one after another."""

import functools
from typing import Any

import tensorflow as tf

from keras_conflux._communication.transports.ops import Op


def all_reduce(tensor: tf.Tensor, op: Op, device: str) -> tf.Tensor:
    """Pauses all replicas and reduces their tensors on one device.

    Args:
        tensor: The calling replica's.
        op: Any but `MEAN`.
        device: The device that reduces.
    """

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
