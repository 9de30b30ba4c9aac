"""Tells what goes around in a loop, and whether it has a turn for each sample.

A loop is traced from within, where nobody can tell what it begins with.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext


def while_loop(
    original: Callable,
    cond: Callable,
    body: Callable,
    loop_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Traces a loop, and notes what it is for those who draw in it.

    Rows that a loop begins with are rows in each turn, as a loop keeps the
    shapes of what goes around. Integers are taken to count turns.
    """
    context = step_context.current_fit_step()
    if context is None or context.graph is None:
        return original(cond, body, loop_vars, *args, **kwargs)
    loop = _Loop(context, [context.kinds.of(x) for x in _flat(loop_vars)])
    loop.note_turns(kwargs.get("maximum_iterations"))

    def traced_cond(*inside: Any) -> Any:
        loop.mark(inside)
        goes_on = cond(*inside)
        loop.note_turns(goes_on)
        return goes_on

    def traced_body(*inside: Any) -> Any:
        loop.mark(inside)
        context.loops_over_samples += loop.may_be_over_samples
        try:
            return body(*inside)
        finally:
            context.loops_over_samples -= loop.may_be_over_samples

    return original(traced_cond, traced_body, loop_vars, *args, **kwargs)


class _Loop:
    """What is known of a loop.

    Args:
        context: The step's.
        kinds: Of what it begins with.
    """

    def __init__(self, context: StepContext, kinds: list[Kind]) -> None:
        self.may_be_over_samples = context.kinds.is_blind
        self._context = context
        self._kinds = kinds

    def note_turns(self, tells: Any) -> None:
        """Notes something by which the number of turns is told."""
        if tells is not None and self._context.kinds.of(tells) != EQUAL:
            self.may_be_over_samples = True

    def mark(self, inside: Any) -> None:
        """Says what the tensors of a turn are, as far as that is known."""
        tensors = _flat(inside)
        if len(tensors) != len(self._kinds):
            return
        for tensor, kind in zip(tensors, self._kinds, strict=True):
            if not tf.is_tensor(tensor) or tensor.dtype == tf.variant:
                continue  # a list, which may be filled
            counts = kind == EQUAL and tensor.dtype.is_integer
            if counts or kind.role is Role.ROWS:
                self._context.kinds.mark(tensor, kind)


def _flat(tree: Any) -> list[Any]:
    return tf.nest.flatten(tree, expand_composites=True)
