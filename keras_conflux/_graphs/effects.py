"""What an operation does besides giving its results."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from keras_conflux._graphs import bodies
from keras_conflux._graphs import walks

COLLECTIVES = ("CollectiveReduceV2", "NcclAllReduce", "XlaAllReduce")
"""The types of operations in which replicas wait for each other."""
_WITHOUT_EFFECT = ("ReadVariableOp", "Assert", "Empty")
"""What TensorFlow calls stateful, and what may yet run once more."""
_modules: dict[bytes, bool] = {}
"""StableHLO modules of this package: whether replicas wait in them."""
LOOKUPS = ("LookupTableFindV2", "LookupTableSizeV2")
"""What reads tables, which TensorFlow does not say of them."""


def only_reads(operation: tf.Operation) -> bool:
    """Whether an operation changes nothing, and may read variables inside."""
    if operation.type in _WITHOUT_EFFECT:
        return True
    inside = bodies.graphs_of(operation)
    if not inside:
        is_stateful = operation.op_def.is_stateful
        return (
            not is_stateful
            or _is_cudnn_without_dropout(operation)
            or _waits_in_module(operation) is False
        )
    return None not in inside and all(
        only_reads(inner)
        for body in inside
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


def changes(operation: tf.Operation, handle: Any, graph: Any) -> bool:
    """Whether an operation may change a resource that it uses.

    A branch, a loop or a function may if anything in it does.

    Args:
        operation: Of `graph`.
        handle: The resource, as known outside of all graphs.
        graph: Where the operation is.
    """
    return any(
        bodies.outermost(tensor, graph) is handle
        for tensor in ordered_by(operation)
    )


def is_repeatable(operation: tf.Operation) -> bool:
    """Whether an operation gives the same once more, whatever runs between."""
    return None not in bodies.graphs_of(operation) and not bodies.is_or_runs(
        operation, _has_state
    )


def _has_state(operation: tf.Operation) -> bool:
    is_of_zeros = operation.type == "Empty" and operation.get_attr("init")
    return (
        operation.op_def.is_stateful
        and operation.type not in (*bodies.WITH_BODIES, *_CHECKS)
        and not is_of_zeros
    )


_CHECKS = "CheckNumerics", "CheckNumericsV2"
"""Stateful only so that nobody leaves them out."""


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


def matters(operation: tf.Operation, results: Iterable[tf.Tensor]) -> bool:
    """Whether anything that has an effect, or a result, follows from one.

    Args:
        operation: Of the graph that is being traced.
        results: Tensors of the graph that somebody will read.
    """
    read = {id(each) for each in results}
    return any(
        not only_reads(each) or any(id(x) in read for x in each.outputs)
        for each in walks.walked([operation], walks.after)
    )
