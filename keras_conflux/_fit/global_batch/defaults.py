"""What an operation for which there is no rule makes of its inputs."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import OPAQUE
from keras_conflux._fit.global_batch.kinds import RANDOM
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import combined

Rule = Callable[[tf.Operation, list[Kind]], Any]
"""Returns the kind of all outputs, or a list of them."""
_APART = (Role.ROWS, Role.EQUAL, Role.RANDOM, Role.SHAPE)
LINEAR_ROLES = (Role.TOTAL, Role.MEAN, Role.COUNT)


def of_any(
    operation: tf.Operation, output: tf.Tensor, inputs: list[Kind]
) -> Kind:
    """Decides where there is no rule: such operations keep the batch first."""
    of_rows = [kind for kind in inputs if kind.role is Role.ROWS]
    if of_rows:
        mixed = any(kind.role not in _APART for kind in inputs)
        if all(kind.axis == 0 for kind in of_rows):
            sizes = {
                tensor.shape[0]
                for tensor, kind in zip(operation.inputs, inputs, strict=False)
                if kind.role is Role.ROWS and tensor.shape.rank
            }
            if output.shape.rank and sizes == {output.shape[0]}:
                return combined(of_rows, 0, mixed)
        if output.shape.rank and None in output.shape.as_list():
            return combined(of_rows, None, mixed)
        return DERIVED if is_pure(operation) else OPAQUE
    if any(kind.role is Role.OPAQUE for kind in inputs):
        return OPAQUE
    if set(inputs) <= {EQUAL, RANDOM}:
        return RANDOM
    return DERIVED if is_pure(operation) else OPAQUE


def recomputed(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Has an operation run once more, on what one device would have."""
    unknown = any(kind.is_unknown for kind in inputs)
    return OPAQUE if unknown or not is_pure(operation) else DERIVED


def is_pure(operation: tf.Operation) -> bool:
    return not operation.op_def.is_stateful


def aligned(tensor: tf.Tensor, kind: Kind, output: tf.Tensor) -> int | None:
    if kind.axis is None or tensor.shape.rank is None:
        return None
    if output.shape.rank is None:
        return None
    return kind.axis + output.shape.rank - tensor.shape.rank
