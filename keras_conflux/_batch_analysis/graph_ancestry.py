"""What a traced tensor was computed from."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import traced_graphs
from keras_conflux._batch_analysis.analysis import KindInference


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


def depends_on_samples(value: Any, kinds: KindInference) -> bool:
    """Whether a value was computed from what a replica's samples hold.

    What a graph inside of the step's has computed counts as not.
    """
    if not isinstance(value, tf.Tensor) or value.graph is not kinds.graph:
        return False
    return depends_on([value.op], [each.op for each in kinds.samples])


def may_be_differentiated_by(tensor: tf.Tensor, sources: list[Any]) -> bool:
    """Whether a tensor may have derivatives by one of the sources.

    Whatever is read from a variable counts, if one of the sources is one.
    Nothing flows through integers.
    """
    parts = tf.nest.flatten(sources, expand_composites=True)
    ends = {id(each) for each in parts}
    of_variables = not all(isinstance(each, tf.Tensor) for each in parts)
    waiting, seen = [tensor], set()
    while waiting:
        each = waiting.pop()
        if id(each) in ends:
            return True
        if id(each) in seen or not _has_derivatives(each.dtype):
            continue
        seen.add(id(each))
        if each.dtype == tf.resource and of_variables:
            return True
        waiting.extend(_made_of(each))
    return False


def _has_derivatives(dtype: tf.DType) -> bool:
    passed_on = (tf.resource, tf.variant)
    return dtype.is_floating or dtype.is_complex or dtype in passed_on


def _made_of(tensor: tf.Tensor) -> list[tf.Tensor]:
    if traced_graphs.is_eager(tensor):
        return []
    operation = tensor.op
    if operation.type.startswith("IteratorGetNext"):
        return []
    if operation.type == "Placeholder":
        outside = traced_graphs.captures(tensor.graph).get(id(tensor))
        return [] if outside is None else [outside]
    return list(operation.inputs)


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
