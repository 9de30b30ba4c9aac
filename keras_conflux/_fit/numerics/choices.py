"""Makes replicas take the branches that one device would.

A replica knows the condition of a `tf.cond` for its own samples only. Where a
branch writes something, its condition becomes the global batch's.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._common.contexts import having
from keras_conflux._common.trees import Tree
from keras_conflux._fit.numerics.exit import Exit
from keras_conflux._fit.numerics.global_values import global_values
from keras_conflux._graphs import bodies
from keras_conflux._graphs import rewriting
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step


def choose(original: Callable, given: Any, *args: Any, **kwargs: Any) -> Any:
    """Traces all branches, and may make the choice a common one.

    `tf.cond` is given a condition, and `tf.switch_case` an index.
    """
    step = steps.current_fit_step()
    # While an optimizer updates, all replicas choose alike.
    if step is None or step.is_updating or isinstance(given, int):
        return original(given, *args, **kwargs)
    choice = _Choice(given, step)
    noting = tf.nest.map_structure(
        lambda x: choice.noting(x) if callable(x) else x, args
    )
    return original(choice.condition, *noting, **kwargs)


class Choices(Exit):
    """The choices of replicas in a step by their own samples."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._traced: list[tuple[Any, _Choice | None]] = []
        """Graphs that are being traced, with a choice or the call in them."""
        self._places: list[tuple[str, Any]] = []
        """Work in branches that replicas do together, and the graphs."""

    def end(self, output: Tree) -> Tree:
        """Warns where replicas do not come together, or refuses it.

        See `Exit`.
        """
        for what, graph in self._places:
            if self.is_everywhere(graph):
                continue
            if what == GRADIENT and replica_collectives().count > 1:
                raise NotImplementedError(_apart(what, self.step.name))
            self.step.warn_once(what, _apart(what, "the step"))
        return output

    def calling(
        self, choice: "_Choice | None" = None
    ) -> contextlib.AbstractContextManager[None]:
        """Marks the trace of a branch, or of a function for this place."""
        here = tf.compat.v1.get_default_graph()
        traced = choice.graph if choice else here, choice
        return having(self, _traced=[*self._traced, traced])

    def come_together(self) -> bool:
        """Makes the conditions common of the branches that are being traced.

        Tells if all replicas, or none, reach the current graph, and no loop.
        """
        here = tf.compat.v1.get_default_graph()
        begin, *graphs = [*(graph for graph, _ in self._traced), here]
        if begin is not self.step.graph:
            return False
        for (outer, choice), graph in zip(self._traced, graphs, strict=True):
            if choice is None:
                leads_here = getattr(graph, "outer_graph", None) is outer
            else:
                leads_here = choice.is_common() and graph is choice.branch
            if not leads_here:
                return False
        return True

    def note(self, what: str) -> None:
        """Notes where in a step replicas do something together."""
        graph = tf.compat.v1.get_default_graph()
        if graph is not self.step.graph:
            self.come_together()
            self._places.append((what, graph))

    def is_everywhere(self, graph: Any, repeated: bool = False) -> bool:
        """Whether all replicas run a graph inside of the step's, or none, once.

        If `repeated`, they may run it as often as the others.
        """
        step = self.step
        while graph is not step.graph:
            outer = getattr(graph, "outer_graph", None)
            call = None if outer is None else bodies.call_of(graph, outer)
            if call is None:
                return False
            step.kinds.notice(outer)
            if not _is_run_by_all(call, step, repeated):
                return False
            graph = outer
        return True


GRADIENT = "computes gradients"


def _apart(what: str, step: str) -> str:
    return (
        f"{step} {what} in a loop, or in a branch that each replica chooses by "
        "its own samples, in a way that the graph does not show. Replicas that "
        "choose different branches get different weights, or wait for each "
        "other. Compute the condition from `keras_conflux.allreduce` of the "
        "replicas' values."
    )


class _Choice:
    """A condition, or an index, by which each replica chooses a branch."""

    def __init__(self, given: Any, step: Step) -> None:
        given = tf.convert_to_tensor(given)
        if given.shape.rank != 0:
            given = tf.reshape(given, [])
        self.condition = tf.identity(given)
        """The condition in the graph."""
        self._given = self.condition.op.inputs[0]  # or what is captured as it
        self.graph = tf.compat.v1.get_default_graph()
        """Where it chooses."""
        self.branch: Any = None
        """The graph of the branch that is being traced."""
        self._step = step

    def noting(self, branch: Callable) -> Callable:
        """Returns a branch that tells that it is being traced."""

        def traced() -> Any:
            self.branch = tf.compat.v1.get_default_graph()
            with Choices.of(self._step).calling(self):
                return branch()

        return traced

    def is_common(self) -> bool:
        """Whether all replicas choose alike; sees to it if it can.

        To be asked where all replicas reach the choice.
        """
        if self._step.kinds.of(self.condition) == EQUAL:
            return True
        with self.graph.as_default():
            try:
                # A replaced tensor may not depend on itself.
                (found,) = global_values([self._given], self._step)
            except NotDerivable:
                return False
            rewriting.redirect(self._given, found, [self.condition.op])
        self._step.kinds.mark_equal([self.condition])
        return True


def _is_run_by_all(call: tf.Operation, step: Step, repeated: bool) -> bool:
    if call.type in bodies.LOOPS and not repeated:
        return False
    if call.type in bodies.BRANCHES | bodies.CASES and step.kinds.is_blind:
        return not step.kinds.depends_on_samples(call.inputs[0])
    return step.kinds.chooses_alike(call)
