"""Warns of variables of TensorFlow's own that a step writes.

A `keras.Variable` has a copy on each replica, and what a step writes to it is
made what one device would write. A `tf.Variable` that is no part of one has a
single copy in a process, which each of its replicas writes, or copies that
nobody compares, if it was made in the strategy's scope. The traced graph shows
which of them a step writes, and whether that makes a difference.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._communication.transports.counters import is_counter
from keras_conflux._compat import tensorflow_graphs
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.numerics.writes import Writes
from keras_conflux._replication import state
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import is_replicated
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import replica_index


@dataclasses.dataclass
class _Written:
    """What a step does with something that it writes."""

    handle: Any
    uses: list[tf.Operation]
    writes: list[tf.Operation]
    """Those of the uses that may change it."""


def warn_of_plain_variables(model: keras.Model, context: StepContext) -> None:
    """Warns of each plain variable that one device may leave with another.

    To be called where the first replica of a process has traced its step.

    Args:
        model: Whose step it is.
        context: The step's.
    """
    if replica_index() != 0:
        return
    if replica_collectives().count == 1:
        return
    written = _written(model, context)
    variables = tensorflow_graphs.variables_behind(
        [each.handle for each in written]
    )
    for each in written:
        variable = variables.get(id(each.handle))
        if variable is not None and not _is_right(variable, each, context):
            _warn_of(variable, each.writes[0], context)


def _written(model: keras.Model, context: StepContext) -> list[_Written]:
    """Returns what a step writes that is neither Keras' nor the package's."""
    of_keras = [*state.variables_of(model), *Writes.of(context).variables()]
    known = {
        id(tensorflow_internals.handle_of(copy))
        for variable in of_keras
        for copy in state.copies(variable)
    }
    found = []
    for handle, uses in tensorflow_graphs.uses_of_resources(context.graph):
        if id(handle) in known or is_counter(handle):
            continue
        writes = [
            use
            for use in uses
            if tensorflow_graphs.changes(use, handle, context.graph)
        ]
        if writes:
            found.append(_Written(handle, uses, writes))
    return found


def _is_right(
    variable: tf.Variable, written: _Written, context: StepContext
) -> bool:
    """Whether a variable becomes what one device makes of it."""
    each_has_one = (
        is_replicated(variable)
        or len(tf.distribute.get_strategy().devices) == 1
    )
    if context.kinds.is_blind:
        return is_replicated(variable)  # an optimizer's, as far as one can see
    given = [x for write in written.writes for x in write.inputs]
    if any(context.kinds.of(tensor) != EQUAL for tensor in given):
        return False
    return each_has_one or _is_set_first(written, context.graph)


def _is_set_first(written: _Written, graph: Any) -> bool:
    """Whether a variable is only set, and not read before that.

    What it was before plays no role then, whether another replica has set it
    or not.
    """
    first, *_ = tensorflow_graphs.in_order(written.uses, graph)
    return first in written.writes and all(
        write.type == "AssignVariableOp" for write in written.writes
    )


def _warn_of(
    variable: tf.Variable, write: tf.Operation, context: StepContext
) -> None:
    described = (
        f"{variable.name!r} of shape {variable.shape} and dtype "
        f"{variable.dtype.name}"
    )
    draws = write.type.startswith("Rng")
    message = _of_generator(described) if draws else _of_any(described)
    context.warn_once(f"variable {id(variable)}", message, write)


def _of_generator(described: str) -> str:
    return (
        "a step draws from a `tf.random.Generator`, whose state is the "
        f"`tf.Variable` {described}. The replicas of a process take turns with "
        "it, so they draw other numbers than one device and leave it with "
        "another state. Draw by `keras.random` with a "
        "`keras.random.SeedGenerator`."
    )


def _of_any(described: str) -> str:
    return (
        f"a step writes the `tf.Variable` {described}. Each replica writes it, "
        "so one device may leave it with another value. Make it a "
        "`keras.Variable(..., trainable=False)`, or what `self.add_weight` of "
        "a layer returns: these are kept as on one device."
    )
