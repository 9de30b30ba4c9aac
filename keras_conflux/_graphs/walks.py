"""Walks through graphs. A function gives the next operations or tensors."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import TypeVar

import tensorflow as tf

from keras_conflux._graphs import bodies

T = TypeVar("T")


def walked(
    starts: Iterable[T], following: Callable[[T], Iterable[T]]
) -> Iterator[T]:
    """Yields the starts, and all that follow from them, each once.

    It is asked for the following ones after one has been yielded.
    """
    waiting, seen = [*starts], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting.extend(following(each))


def before(operation: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that make an operation's inputs, in its graph."""
    return [tensor.op for tensor in operation.inputs]


def made_of(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors of which one is made, also in graphs around it."""
    if bodies.is_eager(tensor) or tensor.op.type.startswith("IteratorGetNext"):
        return []
    if tensor.op.type != "Placeholder":
        return list(tensor.op.inputs)
    outside = bodies.captures(tensor.graph).get(id(tensor))
    return [] if outside is None else [outside]


def depends_on(
    operations: Iterable[tf.Operation], ancestors: Iterable[tf.Operation]
) -> bool:
    """Whether one of the operations depends on one of the ancestors.

    Both are of the graph that is being traced. Captures of graphs inside of it,
    such as the branches of a `tf.cond`, are not followed.
    """
    ends = {id(operation) for operation in ancestors}
    return any(id(each) in ends for each in walked(operations, before))


def flows_past(
    tensors: Iterable[tf.Tensor],
    sources: Iterable[Any],
    stops: Callable[[tf.Operation], bool],
    callers: Mapping[Any, tf.Operation],
) -> bool:
    """Whether values of sources reach tensors past operations that stop them.

    Nothing flows through shapes. The callers run the graphs of tensors.
    """
    ends = {id(source) for source in sources}
    feeding = made_past(stops, callers)
    shapes = ("Shape", "ShapeN", "Size")

    def through_values(tensor: tf.Tensor) -> list[tf.Tensor]:
        is_value = bodies.is_eager(tensor) or tensor.op.type not in shapes
        return feeding(tensor) if is_value else []

    return any(id(each) in ends for each in walked(tensors, through_values))


def made_past(
    stops: Callable[[tf.Operation], bool], callers: Mapping[Any, tf.Operation]
) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Returns a function like `made_of` that enters what a graph calls.

    It goes past no operation that stops it. Of a function that is called twice,
    the second result is made of all that it is given.
    """
    entered = dict(callers)

    def feeding(tensor: tf.Tensor) -> list[tf.Tensor]:
        made = made_of(tensor)
        graph: Any = None if bodies.is_eager(tensor) else tensor.graph
        if not made and graph in entered:
            given = bodies.arguments(entered[graph], graph)
            return [outside for inside, outside in given if inside is tensor]
        if made and tensor.op.type == "IdentityN":
            return [made[tensor.value_index]]
        if made and tensor.op.type in bodies.CALLS:
            (body,) = bodies.graphs_of(tensor.op)
            if entered.setdefault(body, tensor.op) is tensor.op and body:
                return [body.outputs[tensor.value_index]]
        return [] if made and stops(tensor.op) else made

    return feeding


def is_constant(tensor: tf.Tensor, *ends: str) -> bool:
    """Whether a tensor was computed from constants of its graph alone.

    Operations of the types `ends` count as constants.
    """
    return not any(
        each.op_def.is_stateful or each.type == "Placeholder"
        for each in walked(
            [tensor.op], lambda x: () if x.type in ends else before(x)
        )
    )


def may_be_differentiated_by(tensor: tf.Tensor, sources: list[Any]) -> bool:
    """Whether a tensor may have derivatives by one of the sources.

    Reads of a variable count, if it is a source. Integers pass nothing on.
    """
    parts = tf.nest.flatten(sources, expand_composites=True)
    ends = {id(each) for each in parts}
    if not all(isinstance(each, tf.Tensor) for each in parts):
        ends.add(tf.resource)
    return any(
        id(each) in ends or each.dtype in ends
        for each in walked(
            [tensor], lambda x: made_of(x) if has_derivatives(x.dtype) else ()
        )
    )


def has_derivatives(dtype: tf.DType) -> bool:
    """Whether derivatives flow through tensors of a dtype."""
    passed_on = (tf.resource, tf.variant)
    return dtype.is_floating or dtype.is_complex or dtype in passed_on


def in_order(graph: Any, among: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns operations of a graph in the order in which they were traced."""
    wanted = {operation.name for operation in among}
    return [each for each in graph.get_operations() if each.name in wanted]


def by_need(starts: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """Returns the starts and all that they need, each after its needs."""
    found: dict[int, T] = {}
    for start in starts:
        waiting = [start]
        while waiting:
            latest = waiting[-1]
            missing = [each for each in needs(latest) if id(each) not in found]
            if not missing:
                found.setdefault(id(latest), waiting.pop())
            waiting += missing
    return list(found.values())


def to_run(graph: Any) -> list[tf.Operation]:
    """Returns the operations of a graph, each after those that it needs.

    That is the order of tracing, unless one was given another input since.
    """
    every = graph.get_operations()
    return by_need(every, lambda x: [*before(x), *x.control_inputs])


def in_other_graphs(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields a tensor's counterparts in graphs inside of and around its own."""
    for operation in tensor.consumers():
        for body in filter(None, bodies.graphs_of(operation)):
            for inside, outside in bodies.arguments(operation, body):
                if outside is tensor:
                    yield inside
    outer = getattr(tensor.graph, "outer_graph", None)
    outputs = getattr(tensor.graph, "outputs", ())
    places = [i for i, x in enumerate(outputs) if x is tensor]
    call = bodies.call_of(tensor.graph, outer) if places and outer else None
    if call is not None:
        yield from (call.outputs[place] for place in places)
