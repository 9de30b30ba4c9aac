"""Reads and copies what TensorFlow has traced, whatever it computes."""

import functools
import weakref
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.framework import ops
from tensorflow.python.ops import handle_data_util

Gradient = Callable[[tf.Operation, list[tf.Tensor]], Sequence[tf.Tensor | None]]
"""Returns the derivatives by the inputs of a copy of an operation."""
COLLECTIVES = ("CollectiveReduceV2", "NcclAllReduce", "XlaAllReduce")
"""The types of operations in which replicas wait for each other."""
CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
BRANCHES = frozenset(("If", "StatelessIf"))
CASES = frozenset(("Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))
WITH_BODIES = CALLS | BRANCHES | CASES | LOOPS
_GRADIENT = "_gradient_op_type"
_CAPTURES = "_captures_by_placeholder"
_custom_gradient: Any = tf.custom_gradient

_older_graphs: Any = weakref.WeakKeyDictionary()
_WITHOUT_EFFECT = ("ReadVariableOp", "Assert", "Empty")
"""What TensorFlow calls stateful, and what may yet run once more."""
_types_with_functions: dict[str, bool] = {}
_modules: dict[bytes, bool] = {}
"""StableHLO modules of this package: whether replicas wait in them."""
LOOKUPS = ("LookupTableFindV2", "LookupTableSizeV2")
"""What reads tables, which TensorFlow does not say of them."""


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Lets shape functions know what lies behind a handle, as behind another.

    Args:
        source: The handle of a variable, for example.
        target: A placeholder for it.
    """
    handle_data_util.copy_handle_data(source, target)


def variable_behind(
    handle: tf.Tensor,
) -> tuple[tf.TensorShape, tf.DType] | None:
    """Returns the shape and dtype of a variable, if its handle tells them.

    Args:
        handle: Of a variable, or a placeholder for it.
    """
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    found = data.shape_and_type[0]
    return tf.TensorShape(found.shape), tf.as_dtype(found.dtype)


def only_reads(operation: tf.Operation) -> bool:
    """Whether an operation changes nothing, and may read variables inside."""
    if operation.type in _WITHOUT_EFFECT:
        return True
    bodies = graphs_of(operation)
    if not bodies:
        is_stateful = operation.op_def.is_stateful
        return (
            not is_stateful
            or _is_cudnn_without_dropout(operation)
            or _waits_in_module(operation) is False
        )
    return None not in bodies and all(
        only_reads(inner)
        for body in bodies
        for inner in body.get_operations()
        if inner.type != "Placeholder"
    )


def _is_cudnn_without_dropout(operation: tf.Operation) -> bool:
    """Whether an operation is stateful for the numbers that it would draw."""
    is_cudnn = operation.type.startswith("CudnnRNN")
    return is_cudnn and not operation.get_attr("dropout")


def note_module(serialized: bytes, waits: bool) -> None:
    """Lets others know what a StableHLO module does, which has no effect.

    Args:
        serialized: As an operation holds it that calls the module.
        waits: Whether replicas wait for each other in it.
    """
    _modules[serialized] = waits


def _waits_in_module(operation: tf.Operation) -> bool | None:
    """Whether replicas wait in the module that an operation calls.

    Returns:
        `None` if it calls none of this package. TensorFlow calls all stateful.
    """
    if operation.type != "XlaCallModule":
        return None
    return _modules.get(operation.get_attr("module"))


def is_collective(operation: tf.Operation) -> bool:
    """Whether replicas wait for each other in an operation."""
    return operation.type in COLLECTIVES or bool(_waits_in_module(operation))


def captures(graph: Any) -> dict[int, Any]:
    """Returns what a graph takes from outside, by the ids of placeholders.

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
    """Returns what a placeholder stands for outside of all graphs.

    Args:
        tensor: The placeholder, or any other tensor, which is returned.
        graph: The graph that has it.
    """
    while graph is not None:
        outside = captures(graph).get(id(tensor))
        if outside is None:
            break
        tensor, graph = outside, getattr(outside, "graph", None)
        if is_eager(tensor):
            break
    return tensor


def in_order(
    operations: Collection[tf.Operation], graph: Any
) -> list[tf.Operation]:
    """Returns operations of a graph in the order in which they were traced."""
    order = {op.name: place for place, op in enumerate(graph.get_operations())}
    return sorted(operations, key=lambda operation: order[operation.name])


def changes(operation: tf.Operation, handle: Any, graph: Any) -> bool:
    """Whether an operation may change a resource that it uses.

    A branch, a loop or a function may if anything in it does.

    Args:
        operation: Of `graph`.
        handle: The resource, as known outside of all graphs.
        graph: Where the operation is.
    """
    return any(
        outermost(tensor, graph) is handle for tensor in ordered_by(operation)
    )


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has a value, and is not one of a graph."""
    return isinstance(tensor, tf.__internal__.EagerTensor)


def is_reachable(tensor: tf.Tensor) -> bool:
    """Whether the graph that is being traced can use a tensor."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not tensor.graph:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


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
    return [
        function_named(operation.graph, name)
        for name in _functions_of(operation)
    ]


def _functions_of(operation: tf.Operation) -> list[str]:
    """Returns the names of the functions that an operation runs."""
    if not _may_run_functions(operation):
        return []
    attributes = operation.node_def.attr.values()
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
    """Whether an operation, or one inside of what it runs, is of a kind."""
    return is_of_kind(operation) or any(
        is_or_runs(inner, is_of_kind)
        for body in graphs_of(operation)
        if body is not None
        for inner in body.get_operations()
    )


def is_repeatable(operation: tf.Operation) -> bool:
    """Whether an operation gives the same once more, whatever runs between."""
    return None not in graphs_of(operation) and not is_or_runs(
        operation, _has_state
    )


def _has_state(operation: tf.Operation) -> bool:
    is_of_zeros = operation.type == "Empty" and operation.get_attr("init")
    return (
        operation.op_def.is_stateful
        and operation.type not in (*WITH_BODIES, *_CHECKS)
        and not is_of_zeros
    )


_CHECKS = "CheckNumerics", "CheckNumericsV2"
"""Stateful only so that nobody leaves them out."""


def call_of(graph: Any, outer: Any) -> tf.Operation | None:
    """Returns the operation of an outer graph that runs an inner one."""
    for operation in reversed(outer.get_operations()):
        if graph in graphs_of(operation):
            return operation
    return None


def in_other_graphs(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields what a tensor is in graphs inside of its own, and around it."""
    for operation in tensor.consumers():
        bodies = [body for body in graphs_of(operation) if body is not None]
        for body in bodies:
            # The first input may be a condition.
            given = list(operation.inputs)[-len(body.inputs) :]
            for outside, inside in zip(given, body.inputs, strict=False):
                if outside is tensor:
                    yield inside
    outer = getattr(tensor.graph, "outer_graph", None)
    places = [i for i, x in enumerate(_outputs(tensor.graph)) if x is tensor]
    call = call_of(tensor.graph, outer) if places and outer else None
    if call is not None:
        yield from (call.outputs[place] for place in places)


def _outputs(graph: Any) -> Sequence[tf.Tensor]:
    return getattr(graph, "outputs", ())


def defines_gradient(operation: tf.Operation) -> bool:
    """Whether a program says how an operation is differentiated.

    TensorFlow says it of functions itself.
    """
    is_defined = _GRADIENT in operation.node_def.attr
    return is_defined and not graphs_of(operation)


def has_own_gradient(operation: tf.Operation) -> bool:
    """Whether a program says how an operation, or what it runs, is derived."""
    return is_or_runs(operation, defines_gradient)


def own_gradient(
    operation: tf.Operation, upstream: list[tf.Tensor]
) -> list[tf.Tensor | None] | None:
    """Returns what a program says of an operation's derivatives.

    Args:
        operation: Of the graph that is being traced, or of one around it.
        upstream: The derivatives by its outputs.

    Returns:
        The derivatives by its inputs. `None` if the program says nothing of
        the operation, but may of one that it runs.
    """
    if not defines_gradient(operation):
        return None
    gradient: Any = ops.get_gradient_function(operation)
    found = gradient(operation, *upstream)
    return [None if x is None else tf.convert_to_tensor(x) for x in found]


def copied(
    operation: tf.Operation,
    inputs: list[tf.Tensor],
    gradient: Gradient | None = None,
) -> list[tf.Tensor]:
    """Returns what an operation gives for other inputs.

    It is put into the current graph once more. A function and a conditional
    are traced once more, as TensorFlow could not differentiate their copies.

    Args:
        operation: Traced.
        inputs: Of the copy.
        gradient: Returns the derivatives by the inputs of a copy of an
            operation that has its own gradient, which computes with the tensors
            of the operation itself. Takes the operation and the derivatives by
            the outputs of the copy.
    """
    if operation.type == "PartitionedCall":
        return _called(operation, "f", inputs, gradient)
    if operation.type == "StatelessIf":
        return tf.nest.flatten(
            tf.cond(
                tf.cast(inputs[0], tf.bool),
                lambda: _called(operation, "then_branch", inputs[1:], gradient),
                lambda: _called(operation, "else_branch", inputs[1:], gradient),
            )
        )
    if gradient is None or not has_own_gradient(operation):
        return _copied_as_it_is(operation, inputs)
    derivative = functools.partial(gradient, operation)

    @_custom_gradient
    def copy(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        outputs = _copied_as_it_is(operation, list(inputs))
        return outputs, lambda *upstream: derivative([*upstream])

    return copy(*inputs)


def copy_to_other(
    operations: dict[tf.Operation, list[tf.Tensor]], known: dict[int, tf.Tensor]
) -> None:
    """Puts operations of another graph into the current one.

    They keep their names and devices, and run the same functions. TensorFlow
    imports all at once, in a fifth of the time that it takes to make them.

    Args:
        operations: What each takes, each after those of which it does.
        known: What tensors of the other graph are in the current one, or in one
            around it, by their ids. It gets the outputs.
    """
    here: Any = tf.compat.v1.get_default_graph()
    copies = tf.compat.v1.GraphDef()
    copies.versions.CopyFrom(here.graph_def_versions)
    given: dict[str, tf.Tensor] = {}
    for operation, inputs in operations.items():
        for name in _functions_of(operation):
            here._add_function_recursive(operation.graph._get_function(name))
        node = copies.node.add()
        node.CopyFrom(operation.node_def)
        node.attr.pop("_class", None)
        node.input[:] = [each.name for each in inputs]
        for each in inputs:
            if each.op not in operations and each.name not in given:
                outside = _constant_if_known(known[id(each)])
                given[each.name] = here.capture(outside)
    begin = len(here.get_operations())
    found = tf.graph_util.import_graph_def(
        copies, given, [each.name for each in operations], name=""
    )
    # By this order TensorFlow knows what is read before it is written.
    if found != here.get_operations()[begin:]:
        raise AssertionError("TensorFlow imports operations in another order")
    for operation, copy in zip(operations, found, strict=True):
        for old, new in zip(operation.outputs, copy.outputs, strict=True):
            known[id(old)] = new
            if old.dtype in (tf.resource, tf.variant):
                copy_handle_data(old, new)
            elif new.shape.rank is None or not new.shape.is_fully_defined():
                new.set_shape(old.shape)


def written_by(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the resources that an operation may change."""
    if only_reads(operation) or operation.type in LOOKUPS:
        return []
    return ordered_by(operation)


def ordered_by(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the resources by which TensorFlow orders an operation."""
    _, changed = _read_and_changed(operation)
    return [*changed]


def reads_resources_only(operation: tf.Operation) -> bool:
    """Whether an operation reads resources, as a lookup does."""
    if operation.type in LOOKUPS:
        return True
    read, changed = _read_and_changed(operation)
    return bool(read) and not changed


def _read_and_changed(operation: tf.Operation) -> Any:
    find: Callable = auto_control_deps_utils.get_read_write_resource_inputs
    return find(operation)


def _copied_as_it_is(
    operation: tf.Operation, inputs: list[tf.Tensor]
) -> list[tf.Tensor]:
    definition = operation.node_def
    copy = tf.compat.v1.get_default_graph().create_op(
        operation.type,
        [_constant_if_known(each) for each in inputs],
        [output.dtype for output in operation.outputs],
        attrs={k: v for k, v in definition.attr.items() if k != "_class"},
        op_def=operation.op_def,
    )
    return list(copy.outputs)


def _constant_if_known(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a constant of the current graph for one of a graph around it.

    Shapes that are captured are unknown to TensorFlow's shape functions.
    """
    known = outermost(tensor, getattr(tensor, "graph", None))
    is_here = getattr(known, "graph", None) is tf.compat.v1.get_default_graph()
    if is_here or not tensor.dtype.is_integer:
        return tensor
    value = tf.get_static_value(known)
    return tensor if value is None else tf.constant(value, tensor.dtype)


def _called(
    operation: tf.Operation,
    attribute: str,
    inputs: list[tf.Tensor],
    gradient: Gradient | None,
) -> list[tf.Tensor]:
    """Returns what a function that an operation calls gives for inputs."""
    name = operation.node_def.attr[attribute].func.name
    body = function_named(operation.graph, name)
    known = {
        placeholder.name: tensor
        for placeholder, tensor in zip(body.inputs, inputs, strict=True)
    }
    for inner in body.get_operations():
        if inner.type == "Placeholder":
            continue
        given = [known[x.name] for x in inner.inputs]
        values = copied(inner, given, gradient)
        for old, new in zip(inner.outputs, values, strict=True):
            known[old.name] = new
    # To the graph, TensorFlow adds what it needs for derivatives.
    outputs = body.outputs[: len(operation.outputs)]
    return [known[x.name] for x in outputs]


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
    if is_eager(tensor):
        return []
    operation = tensor.op
    if operation.type.startswith("IteratorGetNext"):
        return []
    if operation.type == "Placeholder":
        outside = captures(tensor.graph).get(id(tensor))
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
