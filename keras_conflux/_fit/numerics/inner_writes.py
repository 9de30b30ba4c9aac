"""Reads in a step's graph what it does with a variable that it writes.

A branch of `tf.cond` and a `tf.function` that the step calls have graphs of
their own, whose tensors cannot be used at the end of the step. What is written
there is averaged or summed at the end of the step where that gives what one
device would have written.

A step that sets `v` to `a * v + b`, with a constant `a` and a `b` of its data,
makes `v` a sum of such `b`, however many steps run. The mean of sums is the sum
of means: so to average the replicas' copies once after many steps gives what
averaging them after each one does, up to rounding. The statistics that
BatchNormalization keeps are of this kind, a hundred small tensors in a ResNet.
"""

import itertools
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.numerics.counters import SUMS
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication import state
from keras_conflux._replication.steps import Step
from keras_conflux._replication.strategy import replica_index


def is_moving_average(
    variable: keras.Variable, step: Step, of_own_samples: bool
) -> bool:
    """Whether all that a replica's step does with a variable is as above.

    To be asked where the step has been traced, before anything else is done
    with the variable there.

    Args:
        variable: Which the step writes.
        step: The replica's.
        of_own_samples: Whether it is a statistic of a replica's own samples.
    """
    copy = state.copies(variable)[replica_index()]
    uses = tensorflow_graphs.uses_of(copy)
    if [op.type for op in uses] != ["ReadVariableOp", "AssignVariableOp"]:
        return False
    read, write = uses
    scaled = _only_user(read)
    if scaled is None or scaled.type != "Mul" or not _has_constant(scaled):
        return False
    added = _only_user(scaled)
    if added is None or added.type != "AddV2" or _only_user(added) is not write:
        return False
    roles = {step.kinds.of(term).role for term in added.inputs}
    return of_own_samples or not roles & {Role.TOTAL, Role.DERIVED}


def is_computed_from(value: Any, variable: keras.Variable) -> bool:
    """Whether a traced value depends on what a replica's copy was."""
    copies = state.copies(variable)
    if not tf.is_tensor(value) or len(copies) == 1:
        return False
    uses = tensorflow_graphs.uses_of(copies[replica_index()])
    reads = [op for op in uses if op.type == "ReadVariableOp"]
    return depends_on([value.op], reads)


def _only_user(operation: tf.Operation) -> tf.Operation | None:
    users = operation.outputs[0].consumers()
    return users[0] if len(users) == 1 else None


def _has_constant(operation: tf.Operation) -> bool:
    return any(tf.get_static_value(x) is not None for x in operation.inputs)


def are_reduced_well(
    variable: keras.Variable,
    values: list[tf.Tensor],
    step: Step,
    adds: bool,
) -> bool:
    """Whether the end of a step makes of all that is written what is right.

    Args:
        variable: Of which inner graphs write something.
        values: What is written to this replica's copy.
        step: The replica's.
        adds: Whether what is added is summed, rather than values averaged.
    """
    if adds:
        return all(_adds_sum(value, step) for value in values)
    roles = {step.kinds.of(value).role for value in values}
    allowed = {Role.EQUAL, Role.RANDOM}
    if keras.backend.is_float_dtype(variable.dtype):
        allowed = {Role.EQUAL, Role.MEAN}
    return roles <= allowed


def _adds_sum(value: tf.Tensor, step: Step) -> bool:
    if value.op.type not in SUMS:
        return False
    kept, change = (step.kinds.of(term).role for term in value.op.inputs)
    return kept is Role.EQUAL and change in (Role.TOTAL, Role.COUNT)


def is_read_inside(variable: keras.Variable, step: Step) -> bool:
    """Whether graphs inside of the step's read what it has written before."""
    return any(
        tensorflow_graphs.graphs_of(use)
        for use in _uses_after_write(handle_of_copy(variable), step.graph)
    )


def handle_of_copy(variable: keras.Variable) -> Any:
    """Returns the handle of this replica's copy of a variable."""
    copy = state.copies(variable)[replica_index()]
    return tensorflow_internals.handle_of(copy)


def is_read_later(
    variable: keras.Variable, values: list[tf.Tensor], step: Step
) -> bool:
    """Whether a step uses what an inner graph has written to a variable."""
    handle = handle_of_copy(variable)
    graphs = {id(x.graph): x.graph for x in values}
    while graphs:
        graph = graphs.pop(next(iter(graphs)))
        if _is_used_after_write(handle, graph):
            return True
        if graph is not step.graph:
            graphs[id(graph.outer_graph)] = graph.outer_graph
    return False


def _is_used_after_write(handle: Any, graph: Any) -> bool:
    return not all(
        tensorflow_graphs.changes(use, handle, graph)
        for use in _uses_after_write(handle, graph)
    )


def _uses_after_write(handle: Any, graph: Any) -> list[tf.Operation]:
    """Returns what uses a variable in a graph, from the first write on."""
    uses = [
        use
        for found, users in tensorflow_graphs.uses_of_resources(graph)
        if found is handle
        for use in users
    ]
    return [
        *itertools.dropwhile(
            lambda use: not tensorflow_graphs.changes(use, handle, graph),
            tensorflow_graphs.in_order(uses, graph),
        )
    ]
