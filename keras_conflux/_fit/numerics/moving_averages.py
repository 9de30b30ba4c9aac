"""Finds moving averages, which a step writes and otherwise ignores.

A step that sets `v` to `a * v + b`, with a constant `a` and a `b` of its data,
makes `v` a sum of such `b`, however many steps run. The mean of sums is the sum
of means: so to average the replicas' copies once after many steps gives what
averaging them after each one does, up to rounding. The statistics that
BatchNormalization keeps are of this kind, a hundred small tensors in a ResNet.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication import state
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_index


def is_moving_average(variable: keras.Variable, context: StepContext) -> bool:
    """Whether all that a replica's step does with a variable is as above.

    To be asked where the step has been traced, before anything else is done
    with the variable there.
    """
    copy = state.copies(variable)[replica_index()]
    uses = tensorflow_graphs.uses_of(copy)
    if [op.type for op in uses] != ["ReadVariableOp", "AssignVariableOp"]:
        return False
    read, write = uses
    scaled = _only_user(read)
    if scaled is None or scaled.type != "Mul" or not _has_constant(scaled):
        return False
    added = _only_user(scaled)
    if added is None or added.type != "AddV2" or _only_user(added) is not write:
        return False
    roles = {context.kinds.of(term).role for term in added.inputs}
    if id(variable) in context.statistics:  # of a replica's own samples
        return True
    return not roles & {Role.TOTAL, Role.DERIVED}


def is_computed_from(value: Any, variable: keras.Variable) -> bool:
    """Whether a traced value depends on what a replica's copy was."""
    copies = state.copies(variable)
    if not tf.is_tensor(value) or len(copies) == 1:
        return False
    uses = tensorflow_graphs.uses_of(copies[replica_index()])
    reads = [op for op in uses if op.type == "ReadVariableOp"]
    return depends_on([value.op], reads)


def _only_user(operation: tf.Operation) -> tf.Operation | None:
    users = operation.outputs[0].consumers()
    return users[0] if len(users) == 1 else None


def _has_constant(operation: tf.Operation) -> bool:
    return any(tf.get_static_value(x) is not None for x in operation.inputs)
