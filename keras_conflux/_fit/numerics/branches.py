"""Makes replicas choose the branch that one device would choose.

A replica knows the condition of a `tf.cond` for its own samples only. Mostly
this does not matter, as what a branch returns is read like the rest of the
graph. Where a branch changes weights, replicas that choose different ones come
apart. So where a branch writes something, its condition becomes that of the
global batch, while the branch is traced. Conditions of other branches stay
what they are.
"""

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
    """Traces both branches, and may make the condition a common one."""
    context = _choosing()
    if context is None or isinstance(pred, bool):
        return original(pred, true_fn, false_fn, name)
    choice = _Choice(pred, context)
    branches = map(choice.noting, (true_fn, false_fn))
    return original(choice.condition, *branches, name)


def indexed_case(
    original: Callable,
    branch_index: Any,
    branch_fns: list[Callable],
    **kwargs: Any,
) -> Any:
    """Traces all branches, and may make the index a common one."""
    context = _choosing()
    if context is None or isinstance(branch_index, int):
        return original(branch_index, branch_fns, **kwargs)
    choice = _Choice(branch_index, context)
    branches = [*map(choice.noting, branch_fns)]
    return original(choice.condition, branches, **kwargs)


def _choosing() -> StepContext | None:
    """Returns the step that is traced, where replicas may choose apart."""
    context = step_context.current_fit_step()
    if context is None or context.graph is None or context.optimizing:
        return None
    return context


class _Choice:
    """A condition, or an index, by which each replica chooses a branch.

    Args:
        given: What the step chooses by.
        context: The step's.
    """

    def __init__(self, given: Any, context: StepContext) -> None:
        given = tf.convert_to_tensor(given)
        if given.shape.rank != 0:
            given = tf.reshape(given, [])
        self.condition = tf.identity(given)
        """What the graph chooses by."""
        self.graph = tf.compat.v1.get_default_graph()
        """Where it chooses."""
        self._branch: Any = None
        self._context = context

    def noting(self, branch: Callable) -> Callable:
        """Returns a branch that tells that it is being traced."""

        def traced() -> Any:
            self._branch = tf.compat.v1.get_default_graph()
            self._context.choices.append(self)
            try:
                return branch()
            finally:
                self._context.choices.pop()

        return traced

    def leads_to(self, graph: Any) -> bool:
        """Whether a graph is the branch that is being traced."""
        return graph is self._branch

    def is_common(self) -> bool:
        """Whether all replicas choose alike; sees to it if it can.

        To be asked where all replicas come to the choice.
        """
        if self._context.kinds.of(self.condition) == EQUAL:
            return True
        with self.graph.as_default():
            try:
                (found,) = global_values([self.condition], self._context)
            except CannotTell:
                return False
            tensorflow_graphs.replace_input(self.condition.op, found)
        self._context.kinds.mark_equal([self.condition])
        return True


def choose_together(context: StepContext) -> bool:
    """Makes the conditions common of the branches that are being traced.

    To be called where a step writes something. Nothing can be exchanged in
    loops.

    Returns:
        Whether all replicas come to what is being traced, or none.
    """
    here = tf.compat.v1.get_default_graph()
    reached, *others = [*(each.graph for each in context.choices), here]
    if reached is not context.graph:
        return False
    return all(
        choice.is_common() and choice.leads_to(graph)
        for choice, graph in zip(context.choices, others, strict=True)
    )


def note_update(optimizer: Any, context: StepContext) -> None:
    """Notes where in a step an optimizer changes weights."""
    choose_together(context)
    graph = tf.compat.v1.get_default_graph()
    if context.graph is not None and graph is not context.graph:
        context.updates_inside.append((optimizer.name, graph))


def assert_chosen_together(context: StepContext) -> None:
    """Sees to it that replicas come to the updates of optimizers together."""
    for name, graph in context.updates_inside:
        if is_everywhere(graph, context):
            continue
        context.warn_once(
            f"optimizer {name}",
            f"the step applies the optimizer {name!r} in a loop, or in a "
            "branch that each replica chooses by its own samples, in a way "
            "that the graph does not show. Replicas that choose different "
            "branches get different weights. Compute the condition from "
            "`keras_conflux.allreduce` of what the replicas have.",
        )


def is_everywhere(
    graph: Any, context: StepContext, repeated: bool = False
) -> bool:
    """Whether all replicas run a graph inside of the step's, or none, once.

    Args:
        graph: Of a branch, for example.
        context: The step's.
        repeated: Whether they may run it as often as the others.
    """
    while graph is not context.graph:
        outer = getattr(graph, "outer_graph", None)
        call = None if outer is None else _call_of(graph, outer)
        if call is None:
            return False
        context.kinds.notice(outer)
        if not _is_run_by_all(call, context, repeated):
            return False
        graph = outer
    return True


def _is_run_by_all(
    call: tf.Operation, context: StepContext, repeated: bool
) -> bool:
    if call.type in control_flow.LOOPS:
        return repeated and context.kinds.turns_alike(call)
    if call.type in control_flow.BRANCHES | control_flow.CASES:
        return _is_shared(call.inputs[0], context)
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
