"""Tells what a `tf.function` is given that a step calls.

A function is traced from within, where nobody can tell what its arguments are,
and what it writes is noted while it is traced. So each step traces it anew,
once for each place from which it is called, and for each way in which its
arguments, and what the step has written to variables, are made of the samples.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext


def call(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and notes the kinds of its arguments."""
    context = step_context.current_fit_step()
    if context is None or context.graph is None or tf.executing_eagerly():
        return original(function, *args, **kwargs)
    leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
    given = [leaf for leaf in leaves if _is_argument(leaf)]
    graph = tf.compat.v1.get_default_graph()
    held = frozenset(context.kinds.held(graph).items())
    known = context.called_functions
    arguments = tuple(_identity(leaf, context) for leaf in given)
    key = id(function), id(graph), arguments, held
    if key not in known:
        own = tensorflow_tracing.untraced(function)
        # The ids are those of no others.
        known[key] = function, graph, given, own
    *_, own = known[key]
    context.choices.append(_Call(graph))
    try:
        with context.kinds.calling(given):
            return original(own, *args, **kwargs)
    finally:
        context.choices.pop()


class _Call:
    """Where a step calls a function, to which all replicas come, or none.

    Args:
        graph: That of the caller.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def leads_to(self, graph: Any) -> bool:
        """Whether a graph is the function's."""
        return getattr(graph, "outer_graph", None) is self.graph

    def is_common(self) -> bool:
        """Whether all replicas of the caller come to it."""
        return True


def _identity(leaf: Any, context: StepContext) -> Any:
    """Returns by what traces for an argument are told apart.

    What follows from several samples is computed once more from what it was
    made of, which the next call may have made of something else.
    """
    kind = context.kinds.of(leaf)
    follows = kind.role is Role.DERIVED or kind.is_entangled
    return (kind, id(leaf)) if follows else kind


def _is_argument(leaf: Any) -> bool:
    """Whether a function has a placeholder for a leaf of its arguments."""
    return tf.is_tensor(leaf) or type(leaf).__module__ == "numpy"
