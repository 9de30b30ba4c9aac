"""The graphs that functions, branches and loops run, and their captures."""

import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph

CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
BRANCHES = frozenset(("If", "StatelessIf"))
CASES = frozenset(("Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))
WITH_BODIES = CALLS | BRANCHES | CASES | LOOPS
_CAPTURES = "_captures_by_placeholder"
_older_graphs: Any = weakref.WeakKeyDictionary()
_types_with_functions: dict[str, bool] = {}


def captures(graph: Any) -> dict[int, Any]:
    """Returns the tensors that a graph captures, by the ids of placeholders.

    TensorFlow lists it anew when there is more of it. A step is asked so often
    that one dictionary per list saves a tenth of the time that tracing takes.
    """
    pairs = getattr(graph, "captures", ())
    listed, found = getattr(graph, _CAPTURES, (None, {}))
    if listed is not pairs:
        found = {id(inside): outside for outside, inside in pairs}
        if pairs:
            setattr(graph, _CAPTURES, (pairs, found))
    return found


def outermost(tensor: Any, graph: Any) -> Any:
    """Returns the tensor outside of all graphs that a graph's one captures."""
    while graph is not None:
        outside = captures(graph).get(id(tensor))
        if outside is None:
            break
        # One that has a value has no graph.
        tensor, graph = outside, getattr(outside, "graph", None)
    return tensor


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has a value, and is not one of a graph."""
    return isinstance(tensor, tf.__internal__.EagerTensor)


def being_traced() -> Iterator[Any]:
    """Yields the graph that is being traced, and those around it."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def is_reachable(tensor: tf.Tensor) -> bool:
    """Whether the graph that is being traced can use a tensor."""
    return any(graph is tensor.graph for graph in being_traced())


def function_named(graph: Any, name: str) -> Any:
    """Returns the graph of a function that a graph calls, if it is known."""
    function = graph._get_function(name)
    if hasattr(function, "graph") or function is None:
        return getattr(function, "graph", None)
    # It was made as in TensorFlow 1, as the loops of `tf.nn.ctc_loss` are.
    if function not in _older_graphs:
        with graph.as_default():  # which has the functions that it calls
            _older_graphs[function] = (
                function_def_to_graph.function_def_to_graph(
                    function.definition, include_library_functions=True
                )
            )
    return _older_graphs[function]


def graphs_of(operation: tf.Operation) -> list[Any]:
    """Returns the graphs that an operation runs, as both of a branch."""
    graph = operation.graph
    return [function_named(graph, name) for name in functions_of(operation)]


def arguments(
    operation: tf.Operation, body: Any
) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Pairs the inputs of a graph with those of the operation that runs it."""
    given = operation.inputs[-len(body.inputs) :]  # without a condition
    return zip(body.inputs, given, strict=False)


def functions_of(operation: tf.Operation) -> list[str]:
    """Returns the names of the functions that an operation runs."""
    if not _may_run_functions(operation):
        return []
    # In one order in all processes, which compare what they have traced.
    attributes = [each for _, each in sorted(operation.node_def.attr.items())]
    functions = [each.func for each in attributes if each.HasField("func")]
    for each in attributes:
        functions.extend(each.list.func)
    return [each.name for each in functions]


def _may_run_functions(operation: tf.Operation) -> bool:
    """Whether operations of its type run functions."""
    kind = operation.type
    if kind not in _types_with_functions:
        attributes = operation.op_def.attr
        _types_with_functions[kind] = any(
            each.type in ("func", "list(func)") for each in attributes
        )
    return _types_with_functions[kind]


def is_or_runs(
    operation: tf.Operation, is_of_kind: Callable[[tf.Operation], bool]
) -> bool:
    """Whether an operation, or one inside of its graphs, is of a kind."""
    return is_of_kind(operation) or any(
        is_or_runs(inner, is_of_kind)
        for body in graphs_of(operation)
        if body is not None
        for inner in body.get_operations()
    )


def call_of(graph: Any, outer: Any) -> tf.Operation | None:
    """Returns the operation of an outer graph that runs an inner one."""
    found = reversed(outer.get_operations())
    return next((each for each in found if graph in graphs_of(each)), None)
