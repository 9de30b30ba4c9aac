"""Makes replicas choose the branch that one device would choose.

A replica knows the condition of a `tf.cond` for its own samples only. Mostly
this does not matter, as what a branch returns is read like the rest of the
graph. Where a branch changes weights, replicas that choose different ones come
apart. The trace shows it, and the step is traced once more, with conditions
that replicas compute together.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._fit.global_batch import control_flow
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext


def cond(
    original: Callable,
    pred: Any,
    true_fn: Callable,
    false_fn: Callable,
    name: str = "cond",
) -> Any:
    """Branches by the condition of the global batch, if a trace has asked."""
    context = step_context.current_fit_step()
    if (
        context is not None
        and context.shares_conditions
        and not context.optimizing
        and tf.compat.v1.get_default_graph() is context.graph
    ):
        pred = _of_global_batch(pred, context)
    return original(pred, true_fn, false_fn, name)


def _of_global_batch(pred: Any, context: StepContext) -> Any:
    if context.kinds.of(pred) != EQUAL:
        with contextlib.suppress(CannotTell):
            (pred,) = global_values([pred], context)
    return pred


def note_update(optimizer: Any, context: StepContext) -> None:
    """Notes where in a step an optimizer changes weights."""
    graph = tf.compat.v1.get_default_graph()
    if context.graph is not None and graph is not context.graph:
        context.updates_inside.append((optimizer.name, graph))


def assert_chosen_together(context: StepContext) -> None:
    """Sees to it that replicas come to the updates of optimizers together."""
    for name, graph in context.updates_inside:
        if is_everywhere(graph, context) or may_become_so(context):
            continue
        context.warn_once(
            f"optimizer {name}",
            f"the step applies the optimizer {name!r} in a loop, or in a "
            "branch that each replica chooses by its own samples, in a way "
            "that the graph does not show. Replicas that choose different "
            "branches get different weights. Compute the condition from "
            "`keras_conflux.allreduce` of what the replicas have.",
        )


def may_become_so(context: StepContext) -> bool:
    """Whether the next trace may have replicas choose together; asks for it."""
    if context.shares_conditions or context.kinds.is_blind:
        return False
    context.to_share_conditions = True
    return True


def is_everywhere(graph: Any, context: StepContext) -> bool:
    """Whether all replicas run a graph inside of the step's, or none, once."""
    while graph is not context.graph:
        outer = getattr(graph, "outer_graph", None)
        call = None if outer is None else _call_of(graph, outer)
        if call is None or call.type in control_flow.LOOPS:
            return False
        if call.type in control_flow.BRANCHES | control_flow.CASES:
            context.kinds.notice(outer)
            if not _is_shared(call.inputs[0], context):
                return False
        graph = outer
    return True


def _is_shared(condition: tf.Tensor, context: StepContext) -> bool:
    if not context.kinds.is_blind:
        return context.kinds.of(condition) == EQUAL
    leaves = tf.nest.flatten(context.shard, expand_composites=True)
    samples = [leaf.op for leaf in leaves if leaf is not None]
    return not depends_on([condition.op], samples)


def _call_of(graph: Any, outer: Any) -> tf.Operation | None:
    """Returns the operation of an outer graph that runs an inner one."""
    for operation in reversed(outer.get_operations()):
        if graph in tensorflow_graphs.graphs_of(operation):
            return operation
    return None
