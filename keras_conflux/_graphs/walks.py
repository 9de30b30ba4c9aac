"""What leads where in a graph."""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._graphs import bodies


def in_order(
    operations: Collection[tf.Operation], graph: Any
) -> list[tf.Operation]:
    """Returns operations of a graph in the order in which they were traced."""
    order = {op.name: place for place, op in enumerate(graph.get_operations())}
    return sorted(operations, key=lambda operation: order[operation.name])


def in_other_graphs(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields what a tensor is in graphs inside of its own, and around it."""
    for operation in tensor.consumers():
        inside = [
            body for body in bodies.graphs_of(operation) if body is not None
        ]
        for body in inside:
            # The first input may be a condition.
            given = list(operation.inputs)[-len(body.inputs) :]
            for outside, inside in zip(given, body.inputs, strict=False):
                if outside is tensor:
                    yield inside
    outer = getattr(tensor.graph, "outer_graph", None)
    places = [i for i, x in enumerate(_outputs(tensor.graph)) if x is tensor]
    call = bodies.call_of(tensor.graph, outer) if places and outer else None
    if call is not None:
        yield from (call.outputs[place] for place in places)


def _outputs(graph: Any) -> Sequence[tf.Tensor]:
    return getattr(graph, "outputs", ())


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
    if bodies.is_eager(tensor):
        return []
    operation = tensor.op
    if operation.type.startswith("IteratorGetNext"):
        return []
    if operation.type == "Placeholder":
        outside = bodies.captures(tensor.graph).get(id(tensor))
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
