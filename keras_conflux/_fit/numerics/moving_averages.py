"""Finds the variables of a step that hold a moving average.

A step that sets `v` to `a * v + b`, with a constant `a` and a `b` of its data,
makes `v` a sum of such `b`, however many steps run. The mean of sums is the sum
of means: so averaging the replicas' copies once after many steps equals
averaging them after each one, up to rounding. The statistics that
BatchNormalization keeps are of this kind, a hundred small tensors in a ResNet.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import Role
from keras_conflux._compat import tensorflow_internals
from keras_conflux._graphs import bodies
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._graphs import walks
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import replica_index
from keras_conflux._replication.steps import Step


def is_moving_average(
    variable: keras.Variable,
    step: Step,
    of_own_samples: bool,
    results: Iterable[tf.Tensor],
) -> bool:
    """Whether a replica's step uses a variable in this way alone.

    To be asked where the step has been traced, before anything else is done
    with the variable there.

    Args:
        variable: The variable that the step writes.
        step: The step of the replica.
        of_own_samples: Whether it is a statistic of a replica's own samples.
        results: The results of the step. A read that leads to none of them, and
            to no write, is none, such as one for a recomputation that then
            has no use for it.
    """
    copy = state.copies(variable)[replica_index()]
    uses = [
        use for use in resources.uses_of(copy) if effects.matters(use, results)
    ]
    if [op.type for op in uses] != ["ReadVariableOp", "AssignVariableOp"]:
        return False
    read, write = uses
    value = write.inputs[1]
    if not _adds_to_scaled(value, variable):
        return False
    if not of_own_samples and not _adds_mean(value, step):
        return False
    scaled = _only_user(read)
    return (
        scaled is not None
        and _only_user(scaled) is value.op
        and _only_user(value.op) is write
    )


def averages(value: tf.Tensor, variable: keras.Variable, step: Step) -> bool:
    """Whether a value is a variable's old one, times a constant, and a mean.

    The mean of the replicas' values is then one device's value.
    """
    return _adds_to_scaled(value, variable) and _adds_mean(value, step)


def _adds_to_scaled(value: tf.Tensor, variable: keras.Variable) -> bool:
    if value.op.type != "AddV2":
        return False
    scaled = [
        term.op
        for term in value.op.inputs
        if term.op.type == "Mul" and _has_constant(term.op)
    ]
    return any(_reads(each, variable) for each in scaled)


def _adds_mean(value: tf.Tensor, step: Step) -> bool:
    roles = {step.kinds.of(term).role for term in value.op.inputs}
    return roles <= {Role.EQUAL, Role.MEAN}


def _reads(operation: tf.Operation, variable: keras.Variable) -> bool:
    handle = handle_of_copy(variable)
    return any(
        each.op.type == "ReadVariableOp"
        and bodies.outermost(each.op.inputs[0], each.graph) is handle
        for each in operation.inputs
    )


def is_computed_from(value: Any, variable: keras.Variable) -> bool:
    """Whether a traced value depends on the old value of a replica's copy."""
    copies = state.copies(variable)
    if not tf.is_tensor(value) or len(copies) == 1:
        return False
    uses = resources.uses_of(copies[replica_index()])
    reads = [op for op in uses if op.type == "ReadVariableOp"]
    return walks.depends_on([value.op], reads)


def handle_of_copy(variable: keras.Variable) -> Any:
    """Returns the handle of this replica's copy of a variable, or the only."""
    copies = state.copies(variable)
    copy = copies[replica_index() if len(copies) > 1 else 0]
    return tensorflow_internals.handle_of(copy)


def _only_user(operation: tf.Operation) -> tf.Operation | None:
    users = operation.outputs[0].consumers()
    return users[0] if len(users) == 1 else None


def _has_constant(operation: tf.Operation) -> bool:
    return any(tf.get_static_value(x) is not None for x in operation.inputs)
