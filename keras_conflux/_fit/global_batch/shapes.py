"""The kinds of shapes and sizes, and of what is made from them."""

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import aligned
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.defaults import recomputed
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import OPAQUE
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import count
from keras_conflux._fit.global_batch.kinds import rows
from keras_conflux._fit.global_batch.kinds import shape


def _shape_of(operation: tf.Operation, inputs: list[Kind]) -> list[Kind]:
    del operation
    return [_shape_of_one(kind) for kind in inputs]


def _shape_of_one(kind: Kind) -> Kind:
    if kind.role is Role.ROWS and kind.axis is not None:
        if kind.mixed and not kind.regular:
            return DERIVED
        return shape(kind.axis, kind.regular)
    if kind.role is Role.ROWS:
        return OPAQUE
    if kind.role in (Role.DERIVED, Role.OPAQUE):
        return kind
    return EQUAL


def _size_of(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    del operation
    kind = _shape_of_one(inputs[0])
    if kind.role is not Role.SHAPE:
        return kind
    return count(kind.regular)


def _filled(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `fill(shape, value)`."""
    sizes, value = inputs
    if sizes.role is Role.SHAPE and value == EQUAL:
        return rows(sizes.axis, sizes.regular)
    return of_any(operation, operation.outputs[0], inputs)


def _broadcast_to(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    value, sizes = inputs
    if value.role is Role.ROWS:
        axis = aligned(operation.inputs[0], value, operation.outputs[0])
        return value.at(axis)
    return _filled(operation, [sizes, value])


_OF_PLACES = (
    "Range LinSpace Diag MatrixDiag MatrixDiagV2 MatrixDiagV3 Unique UniqueV2"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(("Shape", "ShapeN"), _shape_of),
    **dict.fromkeys(_OF_PLACES.split(), recomputed),
    "Size": _size_of,
    "Fill": _filled,
    "BroadcastTo": _broadcast_to,
}
