"""What a traced tensor was computed from."""

from collections.abc import Iterable

import tensorflow as tf


def depends_on(
    operations: Iterable[tf.Operation], ancestors: Iterable[tf.Operation]
) -> bool:
    """Whether one of the operations depends on one of the ancestors.

    Both are of the graph that is being traced. What graphs inside of it, such
    as the branches of a `tf.cond`, take from outside is not followed.
    """
    ends = {id(op) for op in ancestors}
    waiting = list(operations)
    seen: set[int] = set()
    while waiting:
        op = waiting.pop()
        if id(op) in ends:
            return True
        if id(op) not in seen:
            seen.add(id(op))
            waiting.extend(tensor.op for tensor in op.inputs)
    return False


def is_constant(tensor: tf.Tensor) -> bool:
    """Whether a tensor was computed from constants of its graph alone."""
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if id(op) not in seen:
            seen.add(id(op))
            if op.op_def.is_stateful or op.type == "Placeholder":
                return False
            waiting.extend(each.op for each in op.inputs)
    return True
