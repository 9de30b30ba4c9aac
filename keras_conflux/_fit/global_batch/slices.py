"""The kinds that operations give which take a part of a tensor."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from keras_conflux._fit.global_batch.constants import static_value
from keras_conflux._fit.global_batch.defaults import LINEAR_ROLES
from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import OPAQUE
from keras_conflux._fit.global_batch.kinds import RANDOM
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import count
from keras_conflux._fit.global_batch.kinds import rows
from keras_conflux._fit.global_batch.kinds import shape


def _strided_slice(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    if kind.role is Role.SHAPE:
        return _slice_of_shape(operation, kind)
    if kind.role in LINEAR_ROLES:
        return kind
    if kind.role is not Role.ROWS or kind.axis is None:
        return of_any(operation, operation.outputs[0], inputs)
    return _slice_of_rows(operation, kind)


def _slice_of_shape(operation: tf.Operation, kind: Kind) -> Kind:
    begin, end, step = (
        static_value(tensor) for tensor in operation.inputs[1:4]
    )
    length = operation.inputs[0].shape.num_elements()
    if begin is None or end is None or step is None or length is None:
        return OPAQUE
    from_start = operation.get_attr("begin_mask") & 1
    to_end = operation.get_attr("end_mask") & 1
    positions = list(range(length))
    if operation.get_attr("shrink_axis_mask") & 1:
        taken = positions[int(begin[0])]
        return count(kind.regular) if taken == kind.axis else EQUAL
    chosen = positions[
        slice(
            None if from_start else int(begin[0]),
            None if to_end else int(end[0]),
            int(step[0]),
        )
    ]
    if kind.axis not in chosen:
        return EQUAL
    return shape(chosen.index(kind.axis), kind.regular)


def _slice_of_rows(operation: tf.Operation, kind: Kind) -> Kind:
    """Follows the samples' axis through `x[:, 0, ..., tf.newaxis]`."""
    attribute = operation.get_attr
    step = tf.get_static_value(operation.inputs[3])
    rank = operation.inputs[0].shape.rank
    count = operation.inputs[1].shape.num_elements()
    if rank is None or count is None or kind.axis is None:
        return OPAQUE
    new = attribute("new_axis_mask")
    ellipsis = attribute("ellipsis_mask")
    specified = [i for i in range(count) if not new >> i & 1]
    if ellipsis:
        specified = [i for i in specified if not ellipsis >> i & 1]
    missing = rank - len(specified)
    source, target = 0, 0
    for i in range(count):
        if new >> i & 1:
            target += 1
            continue
        if ellipsis >> i & 1:
            if source <= kind.axis < source + missing:
                return kind.at(target + kind.axis - source)
            source, target = source + missing, target + missing
            continue
        shrinks = attribute("shrink_axis_mask") >> i & 1
        if source == kind.axis:
            if shrinks:
                return DERIVED
            whole = (
                attribute("begin_mask") >> i & 1
                and attribute("end_mask") >> i & 1
                and step is not None
                and step[i] == 1
            )
            if whole:
                return kind.at(target)
            return rows(target, regular=False, mixed=True)
        source, target = source + 1, target + (0 if shrinks else 1)
    return kind.at(target + kind.axis - source)


def _unpack(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    rank = operation.inputs[0].shape.rank
    if kind.role in LINEAR_ROLES:
        return kind
    if kind.role is Role.SHAPE:
        return [
            count(kind.regular) if i == kind.axis else EQUAL
            for i in range(len(operation.outputs))
        ]  # type: ignore[return-value]
    if kind.role is not Role.ROWS or kind.axis is None or rank is None:
        return of_any(operation, operation.outputs[0], inputs)
    axis = operation.get_attr("axis") % rank
    if axis == kind.axis:
        return DERIVED
    return kind.at(kind.axis - (kind.axis > axis))


def _split(position: int) -> Callable:
    def rule(operation: tf.Operation, inputs: list[Kind]) -> Kind:
        kind = inputs[position]
        axis = tf.get_static_value(operation.inputs[0 if position else 2])
        rank = operation.inputs[position].shape.rank
        if kind.role in LINEAR_ROLES:
            return kind
        if kind.role is not Role.ROWS or axis is None or rank is None:
            return of_any(operation, operation.outputs[0], inputs)
        if kind.axis is not None and int(axis) % rank != kind.axis:
            return kind
        if position and _are_blocks(operation.outputs, kind):
            return dataclasses.replace(kind, blocks=1, joined=())
        return rows(kind.axis, regular=False, mixed=True)

    return rule


def _are_blocks(parts: list[tf.Tensor], kind: Kind) -> bool:
    """Whether rows are split, evenly, into what they were joined of."""
    known = {each.tensor.shape[each.axis] for each in kind.joined} - {None}
    return kind.blocks == len(parts) and len(known) < 2


def _gather(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    values, indices, _ = inputs
    axis = tf.get_static_value(operation.inputs[2])
    rank = operation.inputs[0].shape.rank
    added = operation.inputs[1].shape.rank
    if values.role is Role.SHAPE:
        return _gather_sizes(operation, values)
    if axis is None or rank is None or added is None:
        return of_any(operation, operation.outputs[0], inputs)
    axis = int(axis) % rank
    if operation.get_attr("batch_dims"):
        return of_any(operation, operation.outputs[0], inputs)
    if indices.role is Role.ROWS and values in (EQUAL, RANDOM):
        if indices.axis is None:
            return indices.at(None)
        return indices.at(axis + indices.axis)
    if values.role is Role.ROWS and values.axis is not None:
        if axis != values.axis:
            moved = added - 1 if axis < values.axis else 0
            return values.at(values.axis + moved)
        if indices.role is Role.ROWS and indices.axis is not None:
            # Positions of samples find these in any part of the batch.
            mixed = values.is_tangled or indices.mixed or not indices.places
            return rows(axis + indices.axis, indices.regular, mixed)
        return DERIVED
    if values.role in (Role.TOTAL, Role.MEAN) and indices == EQUAL:
        return values
    return of_any(operation, operation.outputs[0], inputs)


def _gather_sizes(operation: tf.Operation, sizes: Kind) -> Kind:
    """Follows `gather(shape, axes)`, as `tf.tensordot` does for some axes."""
    axes = static_value(operation.inputs[1])
    if axes is None or axes.ndim > 1:
        return OPAQUE
    found = [i for i, axis in enumerate(axes.flat) if axis == sizes.axis]
    if not found:
        return EQUAL
    if len(found) > 1:
        return OPAQUE
    if axes.ndim == 0:
        return count(sizes.regular)
    return shape(found[0], sizes.regular)


def _where(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows the positions of what is true, some per sample."""
    if inputs[0].role is Role.ROWS and inputs[0].axis == 0:
        mixed = inputs[0].is_tangled
        return dataclasses.replace(
            rows(0, regular=False, mixed=mixed), places=True
        )
    return of_any(operation, operation.outputs[0], inputs)


RULES: dict[str, Rule] = {
    "StridedSlice": _strided_slice,
    "Unpack": _unpack,
    "Split": _split(1),
    "SplitV": _split(0),
    "GatherV2": _gather,
    "Where": _where,
}
