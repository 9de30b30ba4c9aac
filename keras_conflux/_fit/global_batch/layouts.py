"""The kinds that operations give which join tensors or move axes."""

import dataclasses
import math

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import LINEAR_ROLES
from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.elementwise import sum_of
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import OPAQUE
from keras_conflux._fit.global_batch.kinds import Block
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import combined
from keras_conflux._fit.global_batch.kinds import rows
from keras_conflux._fit.global_batch.kinds import shape


def _pack(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    axis = operation.get_attr("axis")
    scalars = operation.outputs[0].shape.rank == 1
    counts = [i for i, kind in enumerate(inputs) if kind.role is Role.COUNT]
    others = {kind.role for kind in inputs} - {Role.COUNT}
    if scalars and len(counts) == 1 and others <= {Role.EQUAL}:
        return shape(counts[0])
    of_rows = [kind for kind in inputs if kind.role is Role.ROWS]
    if not of_rows:
        return sum_of(operation, inputs)
    axes = {kind.axis for kind in of_rows}
    rank = operation.outputs[0].shape.rank
    if len(axes) > 1 or None in axes or rank is None:
        return combined(of_rows, None)
    old = axes.pop()
    return combined(of_rows, old + (old >= axis % rank))


def _concat(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    *parts, _ = inputs
    axis = tf.get_static_value(operation.inputs[-1])
    rank = operation.outputs[0].shape.rank
    of_rows = [kind for kind in parts if kind.role is Role.ROWS]
    of_shapes = [i for i, k in enumerate(parts) if k.role is Role.SHAPE]
    if len(of_shapes) == 1 and all(
        k in (EQUAL, parts[of_shapes[0]]) for k in parts
    ):
        before = operation.inputs[: of_shapes[0]]
        sizes = [tensor.shape.num_elements() for tensor in before]
        if None in sizes:
            return OPAQUE
        found = parts[of_shapes[0]]
        return shape(sum(sizes) + (found.axis or 0), found.regular)
    if not of_rows:
        return sum_of(operation, parts)
    axes = {kind.axis for kind in of_rows}
    if axis is None or rank is None or len(axes) > 1 or None in axes:
        return combined(of_rows, None)
    samples = axes.pop()
    joined_along = int(axis) % rank
    if joined_along != samples:
        return combined(of_rows, samples)
    if len(of_rows) == len(parts):
        return _joined(list(operation.inputs[:-1]), of_rows, joined_along)
    return DERIVED


def _joined(tensors: list[tf.Tensor], parts: list[Kind], axis: int) -> Kind:
    """Returns the kind of rows that follow each other."""
    if len(parts) == 1:
        return parts[0]
    regular = all(kind.regular for kind in parts)
    if not regular or any(kind.is_entangled for kind in parts):
        return rows(axis, regular, mixed=True)
    return dataclasses.replace(
        rows(axis),
        blocks=sum(kind.blocks for kind in parts),
        joined=tuple(
            Block(tensor, axis, kind.blocks, kind.joined)
            for tensor, kind in zip(tensors, parts, strict=True)
        ),
    )


def _transpose(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    order = tf.get_static_value(operation.inputs[1])
    if kind.role is not Role.ROWS:
        return kind if kind.role in LINEAR_ROLES else DERIVED
    if order is None or kind.axis is None:
        return kind.at(None)
    return kind.at(list(order).index(kind.axis))


def _expand_dims(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    axis = tf.get_static_value(operation.inputs[1])
    rank = operation.outputs[0].shape.rank
    if kind.role is not Role.ROWS or kind.axis is None:
        return kind
    if axis is None or rank is None:
        return kind.at(None)
    new = int(axis) % rank
    return kind.at(kind.axis + (kind.axis >= new))


def _squeeze(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    if kind.role is not Role.ROWS or kind.axis is None:
        return kind
    sizes = operation.inputs[0].shape
    if sizes.rank is None:
        return kind.at(None)
    removed = [axis % sizes.rank for axis in operation.get_attr("squeeze_dims")]
    if not removed:
        if operation.outputs[0].shape.rank is None:
            return kind.at(None)
        removed = [i for i, size in enumerate(sizes) if size == 1]
    if kind.axis in removed:
        return OPAQUE
    before = sum(axis < kind.axis for axis in removed)
    return kind.at(kind.axis - before)


def _reshape(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind, target = inputs
    output = operation.outputs[0]
    if kind.role is not Role.ROWS:
        if target.role is Role.SHAPE or kind.role is Role.SHAPE:
            return DERIVED if kind.role is not Role.OPAQUE else OPAQUE
        return (
            kind
            if kind.role in LINEAR_ROLES
            else of_any(operation, output, inputs)
        )
    if kind.axis is None or output.shape.rank in (None, 0):
        return kind.at(None)
    if target != EQUAL and target.role is not Role.SHAPE:
        return DERIVED if target.role is not Role.OPAQUE else kind.at(None)
    axis = _axis_after_reshape(operation, kind.axis)
    if target.role is Role.SHAPE and target.axis != axis:
        return DERIVED
    if axis is None:
        return DERIVED if target == EQUAL else kind.at(None)
    growing = [i for i, size in enumerate(output.shape) if size is None]
    sizes = tf.get_static_value(operation.inputs[1], partial=True)
    if target.role is Role.SHAPE or growing == [axis]:
        return kind.at(axis)
    return kind.at(axis if sizes is not None and sizes[axis] == -1 else None)


def _axis_after_reshape(operation: tf.Operation, axis: int) -> int | None:
    """Returns the open axis that begins where the samples' axis began."""
    leading = operation.inputs[0].shape.as_list()[:axis]
    if None in leading:
        return None
    before = math.prod(size for size in leading if size is not None)
    for i, size in enumerate(operation.outputs[0].shape.as_list()):
        if size is None:
            return i if before == 1 else None
        if before % size if size else True:
            return None
        before //= size
    return None


RULES: dict[str, Rule] = {
    "Pack": _pack,
    "ConcatV2": _concat,
    "Transpose": _transpose,
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
}
