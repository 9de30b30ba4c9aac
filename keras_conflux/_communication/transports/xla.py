"""All-reduces inside XLA programs, between GPUs."""

from typing import Any

import tensorflow as tf

from keras_conflux._communication.transports.op_names import MERGE_OPS
from keras_conflux._compat import tensorflow_internals

_REDUCED = "keras_conflux/reduced"
"""The collection of a graph that has an entry of each result."""


class XlaNccl:
    """Collectives that XLA lowers to NCCL's.

    NCCL matches them by the order in which programs run them, and XLA orders
    what does not depend on each other as it likes.

    Args:
        size: The number of replicas.
        group_key: Tells this group of devices from others.
        in_order: Whether each depends on the one before, because the programs
            of the group are not the same.
    """

    def __init__(self, size: int, group_key: int, in_order: bool) -> None:
        self._size = size
        self._group_key = group_key
        self._in_order = in_order

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: str, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        del call
        if not self._in_order:
            return self._reduced(tensor, index, op)
        # An entry of what was reduced before travels along. XLA removes other
        # dependencies, such as barriers, before it orders.
        flat = tf.reshape(tensor, [-1])
        before = last_reduced()
        if before is not None:
            flat = tf.concat([flat, [tf.cast(before, flat.dtype)]], 0)
        reduced = self._reduced(flat, index, op)
        note_reduced(tf.reduce_sum(reduced[:1]))
        if before is not None:
            reduced = reduced[:-1]
        return tf.ensure_shape(
            tf.reshape(reduced, tf.shape(tensor)), tensor.shape
        )

    def _reduced(self, tensor: tf.Tensor, index: int, op: str) -> tf.Tensor:
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


def last_reduced() -> tf.Tensor | None:
    """Returns an entry of what was reduced last in this graph or around it.

    `None` where collectives need no order, or where there was none.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        found = graph.get_collection(_REDUCED)
        if found:
            return found[-1]
        graph = getattr(graph, "outer_graph", None)
    return None


def note_reduced(entry: tf.Tensor | None) -> None:
    """Has the next collective of this graph come after one in another graph.

    Args:
        entry: What `last_reduced` returned there, as it comes out of it.
    """
    if entry is not None:
        tf.compat.v1.add_to_collection(_REDUCED, entry)
