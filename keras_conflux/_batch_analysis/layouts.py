"""The kinds that operations give which join tensors or move axes."""

import math

import tensorflow as tf

from keras_conflux._batch_analysis.elementwise import SUMS
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import Block
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import combined
from keras_conflux._batch_analysis.kinds import shape
from keras_conflux._batch_analysis.rule import ANY_ROWS
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import ROWS
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import of_a_sample
from keras_conflux._batch_analysis.rule import rules_of
from keras_conflux._batch_analysis.rule import static_value
from keras_conflux._batch_analysis.shapes import moved_size


def _packed(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    axes = {kind.axis for kind in inputs}
    rank = operation.outputs[0].shape.rank
    if len(axes) > 1 or rank is None:
        return None
    old = axes.pop()
    return combined(inputs, old + (old >= operation.get_attr("axis") % rank))


def _as_shape(tensor: tf.Tensor, kind: Kind) -> Kind | None:
    """Returns the kind of a shape, which `[n]` is, too."""
    if kind.role is Role.COUNT and tensor.shape.as_list() == [1]:
        return shape(0)
    return kind if kind.role is Role.SHAPE else None


def _concat(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    *parts, _ = inputs
    axis = tf.get_static_value(operation.inputs[-1])
    rank = operation.outputs[0].shape.rank
    axes = {kind.axis for kind in parts}
    if axis is None or rank is None or len(axes) > 1:
        return None
    samples = axes.pop()
    joined_along = int(axis) % rank
    if joined_along != samples:
        return combined(parts, samples)
    if len(parts) == 1:
        return parts[0]
    if not all(kind.regular for kind in parts):
        return None
    return Kind(
        Role.ROWS,
        samples,
        Entries.SAME,
        blocks=sum(kind.blocks for kind in parts),
        joined=tuple(map(Block, operation.inputs, parts)),
    )


def _joined_numbers(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Joins tensors without samples."""
    for rule in SUMS:
        if rule.does_accept([kind.form for kind in inputs[:-1]]):
            return rule.claim(operation, inputs[:-1])
    return None


def _transpose(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    order = static_value(operation.inputs[1])
    if order is None:
        return None
    return inputs[0].at(list(order).index(inputs[0].axis))


def expanded(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the samples' axis past a new one."""
    kind = inputs[0]
    axis = tf.get_static_value(operation.inputs[1])
    rank = operation.outputs[0].shape.rank
    if axis is None or rank is None:
        return None
    return kind.at(kind.axis + (kind.axis >= int(axis) % rank))


def squeeze(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the samples' axis past those that are removed."""
    kind = inputs[0]
    sizes = operation.inputs[0].shape
    if sizes.rank is None:
        return None
    removed = [axis % sizes.rank for axis in operation.get_attr("squeeze_dims")]
    if not removed:
        if operation.outputs[0].shape.rank is None:
            return None
        removed = [i for i, size in enumerate(sizes) if size == 1]
    if kind.axis in removed:
        return None
    return kind.at(kind.axis - sum(axis < kind.axis for axis in removed))


def reshape(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the samples to the axis along which they come in their order."""
    kind, target = inputs
    output = operation.outputs[0]
    if not output.shape.rank or operation.inputs[0].shape.rank is None:
        return None
    sizes_given = _as_shape(operation.inputs[1], target)
    if target != EQUAL and sizes_given is None:
        return None
    axis = _axis_after_reshape(operation, kind.axis)
    if axis is None:
        return None
    if kind.blocks > 1 and not _keeps_rows_apart(operation):
        return None
    moved = kind.at(axis).with_entries(_entries_after(operation, kind))
    if sizes_given is not None:
        return moved if sizes_given.axis == axis else None
    growing = [i for i, size in enumerate(output.shape) if size is None]
    sizes = tf.get_static_value(operation.inputs[1], partial=True)
    is_rest = sizes is not None and sizes[axis] == -1
    return moved if growing == [axis] or is_rest else None


def _entries_after(operation: tf.Operation, kind: Kind) -> Entries:
    """Returns how many entries a sample has after a reshape."""
    if kind.entries is not Entries.ONE:
        return kind.entries
    sizes = _sizes_of_rows(operation)
    is_same = sizes is not None and sizes[0] == sizes[1]
    return Entries.ONE if is_same else Entries.SAME


def _keeps_rows_apart(operation: tf.Operation) -> bool:
    """Whether no row after a reshape is made of several rows before."""
    sizes = _sizes_of_rows(operation)
    return sizes is not None and sizes[0] % max(sizes[1], 1) == 0


def _sizes_of_rows(operation: tf.Operation) -> tuple[int, int] | None:
    """Returns how many numbers a row has before a reshape and after it."""
    tensors = operation.inputs[0], operation.outputs[0]
    if any(each.shape.as_list().count(None) != 1 for each in tensors):
        return None
    before, after = map(of_a_sample, tensors)
    return before, after


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


_SUMS = Rule(like(0), LINEAR, Form.EQUAL)
"""Each number is a sum or a mean over samples, wherever it is moved."""
RULES: dict[str, tuple[Rule, ...]] = {
    "Pack": (
        Rule(_packed, ROWS, ...),
        Rule(moved_size, Form.COUNT | Form.EQUAL, ...),
        *SUMS,
    ),
    "ConcatV2": (
        Rule(_concat, ROWS, ..., Form.EQUAL),
        Rule(moved_size, Form.SHAPE | Form.COUNT | Form.EQUAL, ..., Form.EQUAL),
        Rule(_joined_numbers, LINEAR | Form.EQUAL, ..., Form.EQUAL),
    ),
    **rules_of(
        "DynamicStitch ParallelDynamicStitch",
        Rule(moved_size, Form.SHAPE | Form.EQUAL, ...),
    ),
    "BroadcastArgs": (
        Rule(moved_size, Form.SHAPE, Form.SHAPE | Form.EQUAL),
        Rule(moved_size, Form.EQUAL, Form.SHAPE),
    ),
    **rules_of(
        "ConjugateTranspose Transpose",
        Rule(_transpose, ANY_ROWS, Form.EQUAL),
        _SUMS,
    ),
    "ExpandDims": (Rule(expanded, ANY_ROWS | Form.PLACES, Form.EQUAL), _SUMS),
    "Squeeze": (Rule(squeeze, ANY_ROWS | Form.PLACES), Rule(like(0), LINEAR)),
    "Reshape": (
        Rule(reshape, ANY_ROWS, Form.EQUAL | Form.SHAPE | Form.COUNT),
        _SUMS,
    ),
}
