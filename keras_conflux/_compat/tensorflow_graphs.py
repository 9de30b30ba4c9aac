"""What TensorFlow's graphs have and do, beside what their analysis asks."""

import gc
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from keras_conflux._batch_analysis import traced_graphs


def container_of(handle: Any) -> Any:
    """Returns the variable of which a handle is that of a copy, if any."""
    return getattr(handle, "_distributed_container", lambda: None)()


def must_run(tensor: tf.Tensor) -> None:
    """Keeps the op of `tensor` in the graph even if nothing uses its result."""
    # auto_control_deps.py leaves NcclAllReduce out of the ops that must run
    # (ASYNC_STATEFUL_OPS), and XlaAllReduce is not stateful. If one replica
    # ignored the result, its op would be pruned, and the others would wait for
    # it forever.
    tensor.graph.control_outputs.append(tensor.op)


def uses_of(variable: tf.Variable) -> list[tf.Operation]:
    """Returns what uses a variable in the graph that is being traced."""
    # A graph knows a variable by a placeholder for its handle, which
    # FuncGraph.capture makes at the first use and finds again.
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.capture(variable.handle).consumers()


def matters(operation: tf.Operation, results: Iterable[tf.Tensor]) -> bool:
    """Whether anything that has an effect, or a result, follows from one.

    Args:
        operation: Of the graph that is being traced.
        results: Tensors of the graph that somebody will read.
    """
    read = {id(each) for each in results}
    waiting, seen = [operation], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        is_read = any(id(output) in read for output in each.outputs)
        if is_read or not traced_graphs.only_reads(each):
            return True
        waiting += [x for out in each.outputs for x in out.consumers()]
    return False


def uses_of_resources(graph: Any) -> Iterator[tuple[Any, list[tf.Operation]]]:
    """Yields what a graph uses and may change, such as a variable's handle.

    Yields:
        The resource, as known outside of all graphs, and the operations of
        the graph that use it.
    """
    for placeholder in list(getattr(graph, "internal_captures", ())):
        if placeholder.dtype == tf.resource:
            yield (
                traced_graphs.outermost(placeholder, graph),
                placeholder.consumers(),
            )


def variables_behind(handles: Collection[Any]) -> dict[int, Any]:
    """Returns, by the ids of handles, the variables that have them.

    A variable with a copy for each device has several. A handle does not know
    its variable, so this looks at all objects of the program.
    """
    wanted = {id(handle) for handle in handles}
    found: dict[int, Any] = {}
    for each in gc.get_objects() if wanted else ():
        kind = type(each)
        if tf.Variable not in kind.__mro__:
            continue
        if isinstance(each, tf.distribute.DistributedValues):
            copies = each.values
            found.update((id(copy.handle), each) for copy in copies)
        elif kind is not resource_variable_ops._UnreadVariable:
            found.setdefault(id(each.handle), each)
    return {key: each for key, each in found.items() if key in wanted}


def replace_input(
    operation: tf.Operation, tensor: tf.Tensor, index: int = 0
) -> None:
    """Gives an operation another input of the same kind.

    Args:
        operation: Of the graph of `tensor`, which does not depend on it.
        tensor: The input.
        index: Which of its inputs it is.
    """
    operation._update_input(index, tensor)
