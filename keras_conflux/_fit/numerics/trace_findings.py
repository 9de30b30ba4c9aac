"""What a trace shows that its step has to be traced otherwise for.

Two things are seen only where a step writes a variable. The variable may have
a single copy, because no layer of the model holds it. The value may be of
constants alone, one of which may be the number of a replica's samples, if that
is known while tracing. Nobody can tell it from a constant of the program, which
is the same on all replicas.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._compat import keras_variables
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication import state
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import is_replicated
from keras_conflux._replication.strategy import replica_collectives


class TraceAgain(Exception):
    """A step was traced and has to be traced again before it runs.

    Args:
        untracked: The variables that it writes and that have a single copy.
        counted: What it does with a number that may be that of its samples,
            which therefore has to be unknown then.
    """

    def __init__(
        self, untracked: list[keras.Variable], counted: str | None
    ) -> None:
        super().__init__("A step has to be traced again.")
        self.untracked = untracked
        self.counted = counted


def note_write(context: StepContext, variable: Any, value: Any) -> None:
    """Notes what a write tells of how its step is to be traced.

    Args:
        context: The step's, where something else than an optimizer writes.
        variable: The `keras.Variable`.
        value: What it is set to.
    """
    backing = keras_variables.backing(variable)
    if backing is None or replica_collectives().count == 1:
        return
    if not is_replicated(backing):
        context.untracked[id(variable)] = variable
    elif (
        not context.internal
        and state.is_mirrored(variable)
        and _knows_rows(context)
        and not _is_of_samples(value, context)
    ):
        context.counts_rows = (
            f"sets the variable {state.name_of(variable)!r} to a constant, or "
            "adds one"
        )


def _knows_rows(context: StepContext) -> bool:
    """Whether the number of the replica's samples is a constant here."""
    return any(
        leaf.shape.rank and leaf.shape[0] is not None
        for leaf in trees.present(context.shard)
    )


def _is_of_samples(value: Any, context: StepContext) -> bool:
    """Whether a value was computed from what the samples hold.

    What a graph inside of the step's has computed counts as not.
    """
    if isinstance(value, keras.Variable) or not tf.is_tensor(value):
        return False
    traced = isinstance(value, tf.Tensor) and value.graph is context.graph
    leaves = tf.nest.flatten(context.shard, expand_composites=True)
    samples = [leaf.op for leaf in leaves if leaf is not None]
    return traced and depends_on([value.op], samples)


def assert_final(contexts: Iterable[StepContext]) -> None:
    """Raises `TraceAgain` if the replicas' traces have shown such a thing."""
    contexts = list(contexts)
    untracked: dict[int, keras.Variable] = {}
    for context in contexts:
        untracked |= context.untracked
    counted = [each.counts_rows for each in contexts if each.counts_rows]
    if untracked or counted:
        raise TraceAgain(list(untracked.values()), next(iter(counted), None))
