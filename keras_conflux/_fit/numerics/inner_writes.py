"""What a step writes to weights in graphs inside of its own.

A branch of `tf.cond` and a `tf.function` that the step calls have graphs of
their own, whose tensors cannot be used at the end of the step. What is written
there is averaged or summed at the end of the step where that gives what one
device would have written. Where it does not, replicas exchange what they need
at the place of the write, if all of them come there: the step is traced once
more for that.
"""

import itertools
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_graphs
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics import branches
from keras_conflux._replication import state
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_index

SUMS = ("Add", "AddV2", "Sub")


def exchanged(
    variable: keras.Variable,
    value: Any,
    context: StepContext,
    may_exchange: bool,
) -> Any:
    """Returns what one device would write, where that is needed at once.

    So it is where an inner graph writes what its end does not make right, and
    where a replica may have too few samples to fill the variable.

    Args:
        variable: What is written.
        value: What this replica would write.
        context: The step's.
        may_exchange: Whether all replicas come to the place of the write.
    """
    if id(variable) not in context.exchanged_inside and not (
        may_exchange and _may_not_fit(value)
    ):
        return value
    value = keras_variables.as_tensor(value, variable.dtype)
    if context.kinds.of(value) == EQUAL:
        return value
    try:
        found = global_values([value], context)[0]
    except CannotTell:
        return value
    # An axis that the outer graph has is no constant here, so that TensorFlow
    # may not know the shape.
    found = tf.ensure_shape(found, value.shape)
    context.kinds.mark_equal([found])
    return found


def _may_not_fit(value: Any) -> bool:
    """Whether a value has a size that is known only when a step runs."""
    return isinstance(value, tf.Tensor) and not value.shape.is_fully_defined()


def become_right(
    variable: keras.Variable, values: list[tf.Tensor], context: StepContext
) -> bool:
    """Whether the end of the step makes of a variable what one device would.

    If not, but an exchange at the place of the write may, that is noted.

    Args:
        variable: Of which inner graphs write something.
        values: What is written to this replica's copy.
        context: The step's.
    """
    if id(variable) in context.statistics:  # of a replica's own samples
        return True
    everywhere = all(branches.is_everywhere(x.graph, context) for x in values)
    if (
        everywhere
        and _are_reduced_well(variable, values, context)
        and not _is_read_later(variable, values, context)
    ):
        return True
    if everywhere and id(variable) not in context.exchanged_inside:
        context.to_exchange_inside.add(id(variable))
        return True  # by the next trace
    return False


def is_read_inside(
    variable: keras.Variable, values: list[tf.Tensor], context: StepContext
) -> bool:
    """Whether graphs inside of the step's read what it has written.

    They take it for what all replicas have. If they do not, yet, an exchange
    where it is written is noted.

    Args:
        variable: Which the step writes.
        values: What is written to this replica's copy.
        context: The step's.
    """
    if id(variable) in context.exchanged_inside:
        return False
    here = [value for value in values if value.graph is context.graph]
    if all(context.kinds.of(value) == EQUAL for value in here):
        return False
    if not all(branches.is_everywhere(x.graph, context) for x in values):
        return False
    copy = state.copies(variable)[replica_index()]
    handle = tensorflow_internals.handle_of(copy)
    if not any(
        tensorflow_graphs.graphs_of(use)
        for use in _uses_after_write(handle, context.graph)
    ):
        return False
    context.to_exchange_inside.add(id(variable))
    return True


def _are_reduced_well(
    variable: keras.Variable, values: list[tf.Tensor], context: StepContext
) -> bool:
    """Whether to add up, or to average, is right for all that is written."""
    if id(variable) in context.before:
        return all(_adds_sum(value, context) for value in values)
    roles = {context.kinds.of(value).role for value in values}
    allowed = {Role.EQUAL, Role.RANDOM}
    if keras.backend.is_float_dtype(variable.dtype):
        allowed = {Role.EQUAL, Role.MEAN}
    return roles <= allowed


def _adds_sum(value: tf.Tensor, context: StepContext) -> bool:
    if value.op.type not in SUMS:
        return False
    kept, change = (context.kinds.of(term).role for term in value.op.inputs)
    return kept is Role.EQUAL and change in (Role.TOTAL, Role.COUNT)


def _is_read_later(
    variable: keras.Variable, values: list[tf.Tensor], context: StepContext
) -> bool:
    """Whether a step uses what an inner graph has written to a variable."""
    copy = state.copies(variable)[replica_index()]
    handle = tensorflow_internals.handle_of(copy)
    graphs = {id(x.graph): x.graph for x in values}
    while graphs:
        graph = graphs.pop(next(iter(graphs)))
        if _is_used_after_write(handle, graph):
            return True
        if graph is not context.graph:
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
