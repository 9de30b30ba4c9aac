"""Copies regions of graphs, and lets readers read something else."""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from keras_conflux._graphs import bodies
from keras_conflux._graphs import resources
from keras_conflux._graphs import walks

Gradient = Callable[[tf.Operation, list[tf.Tensor]], Sequence[tf.Tensor | None]]
"""Returns the derivatives by the inputs of a copy of an operation."""
_GRADIENT = "_gradient_op_type"
_custom_gradient: Any = tf.custom_gradient


def defines_gradient(operation: tf.Operation) -> bool:
    """Whether a program says how an operation is differentiated.

    TensorFlow says it of functions itself.
    """
    is_defined = _GRADIENT in operation.node_def.attr
    return is_defined and not bodies.graphs_of(operation)


def has_own_gradient(operation: tf.Operation) -> bool:
    """Whether an operation, or one that it runs, has a gradient of its own."""
    return bodies.is_or_runs(operation, defines_gradient)


def own_gradient(
    operation: tf.Operation, upstream: list[tf.Tensor]
) -> list[tf.Tensor | None] | None:
    """Returns the derivatives by inputs that a program defines.

    They are `None` if it says nothing of the operation itself.
    """
    if not defines_gradient(operation):
        return None
    gradient: Any = ops.get_gradient_function(operation)
    found = gradient(operation, *upstream)
    return [None if x is None else tf.convert_to_tensor(x) for x in found]


def redirect(
    old: tf.Tensor, new: tf.Tensor, readers: Iterable[tf.Operation]
) -> None:
    """Lets readers of a tensor read another one, which needs none of them."""
    for reader in readers:
        for index, given in enumerate(reader.inputs):
            if given is old:
                reader._update_input(index, new)


def read_copies(
    reads: Iterable[tuple[tf.Operation, tf.Tensor]],
    again: Iterable[tf.Operation],
    known: dict[int, tf.Tensor],
) -> None:
    """Lets operations read copies of what they have read.

    `reads` has operations, each with a tensor that it reads, and `again` the
    operations to copy in order. For `known`, see `copy_region`.
    """
    again = [*again]
    for tensor in (x for each in again for x in each.inputs):
        known.setdefault(id(tensor), tensor)
    copy_region(again, known, copied_as_it_is)
    for operation, tensor in reads:
        redirect(tensor, known[id(tensor)], [operation])


def must_run(tensor: tf.Tensor) -> None:
    """Keeps the op of `tensor` in the graph even if nothing uses its result."""
    # auto_control_deps.py leaves NcclAllReduce out of the ops that must run
    # (ASYNC_STATEFUL_OPS), and XlaAllReduce is not stateful. If one replica
    # ignored the result, its op would be pruned, and the others would wait for
    # it forever.
    # Graphs of version 1 have none, and run the ops that a session asks for.
    getattr(tensor.graph, "control_outputs", []).append(tensor.op)


def run_independently(operations: Iterable[tf.Operation]) -> None:
    """Takes operations out of the order in which they were traced."""
    for operation in operations:
        manager = getattr(operation.graph, "experimental_acd_manager", None)
        if manager is not None:
            manager.run_independently(operation)


def once_known(
    tensors: Sequence[tf.Tensor], others: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns numbers that XLA reads, or casts, when others are known.

    The others are floats, which may be of any value, and be empty.
    """
    firsts = [tf.reshape(each, [-1])[:1] for each in others]
    entries = tf.concat([tf.cast(each, tf.float32) for each in firsts], 0)
    entry = tf.reduce_max(entries)
    always = tf.equal(entry, entry) | tf.not_equal(entry, entry)
    return [tf.where(always, x, tf.zeros([], x.dtype)) for x in tensors]


def copy_region(
    operations: Iterable[tf.Operation],
    known: dict[int, tf.Tensor],
    copy: Callable[[tf.Operation, list[tf.Tensor]], list[tf.Tensor]],
) -> None:
    """Puts operations into the current graph once more, one after another.

    Each comes after the ones that it needs. `known` has, by the ids of tensors,
    their replacements in the copies, and gets the outputs.
    """
    for operation in operations:
        inputs = [known[id(x)] for x in operation.inputs]
        copies = copy(operation, inputs)
        for old, new in zip(operation.outputs, copies, strict=True):
            # Python code may have said more of it than operations tell.
            new.set_shape(old.shape)
            known[id(old)] = new


def copied(
    operation: tf.Operation,
    inputs: list[tf.Tensor],
    gradient: Gradient | None = None,
) -> list[tf.Tensor]:
    """Returns the outputs of an operation for other inputs.

    It is put into the current graph once more. A function and a conditional
    are traced once more, as TensorFlow could not differentiate their copies.

    The gradient is called for copies of operations with their own gradients,
    which compute with the tensors of the operations themselves.
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
        return copied_as_it_is(operation, inputs)
    derivative = functools.partial(gradient, operation)

    @_custom_gradient
    def copy(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        outputs = copied_as_it_is(operation, list(inputs))
        return outputs, lambda *upstream: derivative([*upstream])

    return copy(*inputs)


def copy_to_other(
    operations: Mapping[tf.Operation, Sequence[tf.Tensor]],
    known: dict[int, tf.Tensor],
    keeps_names: bool = True,
) -> None:
    """Puts operations of other graphs into the current one, all at once.

    They run the same functions. That takes a fifth of the time of making them.

    `operations` has the inputs of each copy, and `known`, by ids, the other
    graphs' tensors in the current one or in one around it. It gets the outputs.
    With `keeps_names`, they also keep their devices and order, and each comes
    after its inputs. Without, they may be of several graphs.
    """
    here: Any = tf.compat.v1.get_default_graph()
    copies = tf.compat.v1.GraphDef()
    copies.versions.CopyFrom(here.graph_def_versions)
    names = {x: x.name for x in operations}
    if not keeps_names:
        names = {x: f"operation_{i}" for i, x in enumerate(operations)}
    given: dict[str, tf.Tensor] = {}
    libraries: set[Any] = set()

    def name(tensor: tf.Tensor) -> str:
        if tensor.op in operations:
            return f"{names[tensor.op]}:{tensor.value_index}"
        found = f"given_{id(tensor)}:0"
        if found not in given:
            outside = _constant_if_known(known[id(tensor)])
            given[found] = getattr(here, "capture", lambda x: x)(outside)
        return found

    for operation, inputs in operations.items():
        for function in bodies.functions_of(operation):
            if keeps_names:
                found = operation.graph._get_function(function)
                here._add_function_recursive(found)
            elif operation.graph not in libraries:
                libraries.add(operation.graph)
                library = operation.graph.as_graph_def().library
                copies.library.MergeFrom(library)
        node = copies.node.add()
        node.CopyFrom(operation.node_def)
        node.attr.pop("_class", None)
        node.input[:] = map(name, inputs)
        if not keeps_names:
            node.name, node.device = names[operation], ""
    begin = len(here.get_operations())
    wanted = [*names.values()]
    found = tf.graph_util.import_graph_def(copies, given, wanted, name="")
    # By this order TensorFlow knows that a read comes before a write.
    if keeps_names and found != here.get_operations()[begin:]:
        raise AssertionError("TensorFlow imports operations in another order")
    for operation, copy in zip(operations, found, strict=True):
        for old, new in zip(operation.outputs, copy.outputs, strict=True):
            known[id(old)] = new
            if old.dtype in (tf.resource, tf.variant):
                resources.copy_handle_data(old, new)
            elif new.shape.rank is None or not new.shape.is_fully_defined():
                new.set_shape(old.shape)


def copied_as_it_is(
    operation: tf.Operation, inputs: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the outputs of an operation that runs the same functions."""
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
    known = bodies.outermost(tensor, getattr(tensor, "graph", None))
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
    """Returns the results of a called function for inputs."""
    name = operation.node_def.attr[attribute].func.name
    body = bodies.function_named(operation.graph, name)
    known = dict(zip(map(id, body.inputs), inputs, strict=True))
    copy = functools.partial(copied, gradient=gradient)
    # A derivative may have given it inputs that were traced later.
    inside = [x for x in walks.to_run(body) if x.type != "Placeholder"]
    copy_region(inside, known, copy)
    # TensorFlow adds outputs to the graph that it needs for derivatives.
    outputs = body.outputs[: len(operation.outputs)]
    return [known[id(x)] for x in outputs]
