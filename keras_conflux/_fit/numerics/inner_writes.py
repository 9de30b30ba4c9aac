"""What replicas write to weights, exchanged where a step writes it.

A branch of `tf.cond` and a `tf.function` that the step calls have graphs of
their own, whose tensors cannot be used at the end of the step. So replicas
exchange what they need at the place of the write, if all of them come there.
What is averaged at the end anyway, as moving averages are, waits until then.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics import branches
from keras_conflux._fit.numerics.moving_averages import averages
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_collectives

SUMS = ("Add", "AddV2", "Sub")


def exchanged(
    variable: keras.Variable,
    value: Any,
    context: StepContext,
    may_exchange: bool,
) -> Any:
    """Returns what one device would write.

    Args:
        variable: What is written.
        value: What this replica would write.
        context: The step's.
        may_exchange: Whether all replicas come to the place of the write.

    Returns:
        The value itself, if it is averaged at the end of the step, or the
        graph does not show how it is computed.
    """
    if (
        not may_exchange
        or context.internal
        or replica_collectives().count == 1
        or id(variable) in context.statistics
    ):
        return value
    value = keras_variables.as_tensor(value, variable.dtype)
    if context.kinds.of(value) == EQUAL or averages(value, variable, context):
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


def are_averaged_well(
    variable: keras.Variable, values: list[tf.Tensor], context: StepContext
) -> bool:
    """Whether a mean over replicas is what one device would have written.

    Args:
        variable: Of which graphs inside of the step's write something.
        values: What is written to this replica's copy.
        context: The step's.
    """
    if id(variable) in context.statistics:  # of a replica's own samples
        return True
    if id(variable) in context.before:
        return False
    roles = {context.kinds.of(value).role for value in values}
    return (
        keras.backend.is_float_dtype(variable.dtype)
        and roles <= {Role.EQUAL, Role.MEAN}
        and all(branches.is_everywhere(x.graph, context) for x in values)
    )
