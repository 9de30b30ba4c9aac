"""The kinds that operations give which take a part of a tensor."""

import dataclasses

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import combined
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.rule import ANY_ROWS
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import ROWS
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import STATISTIC
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import static_value
from keras_conflux._batch_analysis.shapes import moved_size


def _slice_of_rows(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the samples' axis through `x[:, 0, ..., tf.newaxis]`."""
    return _cut(operation, inputs[0], operation.inputs[0].shape.rank)


def _cut(operation: tf.Operation, kind: Kind, rank: int | None) -> Kind | None:
    """Returns the kind of the part that is taken of rows of a rank."""
    attribute = operation.get_attr
    step = tf.get_static_value(operation.inputs[3])
    keys = operation.inputs[1].shape.num_elements()
    if rank is None or keys is None:
        return None
    new, ellipsis = attribute("new_axis_mask"), attribute("ellipsis_mask")
    specified = [i for i in range(keys) if not (new | ellipsis) >> i & 1]
    missing = rank - len(specified)
    source, target = 0, 0
    for i in range(keys):
        if ellipsis >> i & 1:
            if source <= kind.axis < source + missing:
                return kind.at(target + kind.axis - source)
            source, target = source + missing, target + missing
            continue
        if new >> i & 1:
            target += 1
            continue
        shrinks = attribute("shrink_axis_mask") >> i & 1
        if source == kind.axis:
            masks = attribute("begin_mask") & attribute("end_mask")
            if shrinks or not masks >> i & 1 or step is None:
                return None
            found = kind.at(target)
            if step[i] == -1:
                return mixed_rows([found], target)
            return found if step[i] == 1 else None
        source, target = source + 1, target + (0 if shrinks else 1)
    return kind.at(target + kind.axis - source)


def _slice_grad(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows rows to where they were taken from."""
    sizes, *_, values = inputs
    rank = operation.inputs[0].shape.num_elements()
    found = _cut(operation, values.at(sizes.axis), rank)
    return values.at(sizes.axis) if found == values else None


def _unpack(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    kind = inputs[0]
    rank = operation.inputs[0].shape.rank
    if rank is None:
        return None
    axis = operation.get_attr("axis") % rank
    if axis == kind.axis:
        return None
    return kind.at(kind.axis - (kind.axis > axis))


def _split(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows rows that are split, or the blocks of which they were joined."""
    values, axis = _SPLITS[operation.type]
    kind = inputs[values]
    along = tf.get_static_value(operation.inputs[axis])
    rank = operation.inputs[values].shape.rank
    if along is None or rank is None:
        return None
    if int(along) % rank != kind.axis:
        return kind
    is_even = operation.type == "Split"
    are_blocks = is_even and kind.blocks == len(operation.outputs)
    if are_blocks and all(block.one_each for block in kind.joined):
        return dataclasses.replace(kind, blocks=1, joined=())
    return None


def _gather_axis(operation: tf.Operation) -> int | None:
    """Returns the axis of `gather`, if it is known and there is no batch."""
    axis = tf.get_static_value(operation.inputs[2])
    rank = operation.inputs[0].shape.rank
    added = operation.inputs[1].shape.rank
    if axis is None or rank is None or added is None:
        return None
    return None if operation.get_attr("batch_dims") else int(axis) % rank


def _looked_up(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows entries of a table that samples look up."""
    axis = _gather_axis(operation)
    return None if axis is None else inputs[1].at(axis + inputs[1].axis)


def _of_each_sample(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows entries taken from the same places of each sample."""
    axis = _gather_axis(operation)
    values = inputs[0]
    if axis is None or axis == values.axis:
        return None
    added = operation.inputs[1].shape.rank
    return values.at(values.axis + (added - 1 if axis < values.axis else 0))


def _in_batches(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows entries that each sample takes from itself."""
    batch_dims = operation.get_attr("batch_dims")
    values, indices = inputs[:2]
    if values.axis != indices.axis or values.axis >= batch_dims:
        return None
    return combined([values, indices], values.axis)


def _of_places(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows samples that positions find in any part of the batch."""
    values, places = inputs[:2]
    is_one_each = values.entries is Entries.ONE
    if not is_one_each or _gather_axis(operation) != values.axis:
        return None
    if operation.inputs[1].shape[1:].num_elements() != 1:
        return None
    return dataclasses.replace(
        places, axis=values.axis + places.axis, are_positions=False
    )


def _shape_of_taken(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the shape of entries that samples take from other samples."""
    axis = _gather_axis(operation)
    if axis is None:
        return None
    values, indices = inputs[:2]
    if values.role is Role.ROWS and values.axis != axis:
        return None
    sizes = operation.inputs[0].shape
    if not (sizes[:axis] + sizes[axis + 1 :]).is_fully_defined():
        return None
    return mixed_rows([indices], axis + indices.axis)


def _entries_found(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows entries of a table that samples look up by several numbers."""
    last = (operation.inputs[1].shape.rank or 0) - 1
    return inputs[1] if inputs[1].axis < last else None


def _picked_samples(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `gather_nd(rows, where(...))`, whose first number is a place."""
    values, places = inputs
    if values.entries is not Entries.ONE or values.axis != 0:
        return None
    if operation.inputs[1].shape.rank != 2 or places.axis != 0:
        return None  # as other numbers than the first may be taken for one
    return dataclasses.replace(places, are_positions=False)


def _where(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the positions of true entries, some per sample."""
    kind = inputs[0]
    if kind.axis != 0 or kind.entries is not Entries.ONE:
        return None
    return Kind(Role.ROWS, 0, Entries.VARYING, are_positions=True)


def _slice(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    kind = inputs[0]
    begin, size = (
        tf.get_static_value(each, partial=True) for each in operation.inputs[1:]
    )
    if begin is None or size is None:
        return None
    whole = begin[kind.axis] == 0 and size[kind.axis] == -1
    return kind if whole else None


def _slice_to_shape(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a slice of each sample, if the shape tells its size."""
    kind, _, sizes = inputs
    begin = static_value(operation.inputs[1])
    if begin is None or kind.axis != sizes.axis or begin[kind.axis] != 0:
        return None
    return kind if kind.entries is Entries.ONE and sizes.regular else None


def _updated(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows rows of which each gets other entries in the same places."""
    values, part, _ = inputs
    begin = tf.get_static_value(operation.inputs[2], partial=True)
    is_one_each = values.entries is Entries.ONE  # and so is the part of it
    are_aligned = is_one_each and values.axis == part.axis and part.regular
    if begin is None or begin[values.axis] != 0 or not are_aligned:
        return None
    return combined([values, part], values.axis)


_SPLITS = {"Split": (1, 0), "SplitV": (0, 2)}
"""Which inputs are the values, and the axis."""
_THREE_EQUAL = (Form.EQUAL,) * 3
_UNKNOWN_VALUES = ANY_ROWS | STATISTIC ^ Form.COUNT
RULES: dict[str, tuple[Rule, ...]] = {
    "StridedSlice": (
        Rule(_slice_of_rows, ANY_ROWS, *_THREE_EQUAL),
        Rule(moved_size, Form.SHAPE, *_THREE_EQUAL),
        Rule(like(0), LINEAR, *_THREE_EQUAL),
    ),
    "StridedSliceGrad": (
        Rule(_slice_grad, Form.SHAPE, *_THREE_EQUAL, ANY_ROWS),
        Rule(like(4), Form.EQUAL, *_THREE_EQUAL, LINEAR),
    ),
    "Unpack": (
        Rule(_unpack, ANY_ROWS),
        Rule(moved_size, Form.SHAPE),
        Rule(like(0), LINEAR),
    ),
    "Split": (
        Rule(_split, Form.EQUAL, ANY_ROWS),
        Rule(like(1), Form.EQUAL, LINEAR),
        Rule(moved_size, Form.EQUAL, Form.SHAPE),
    ),
    "SplitV": (
        Rule(_split, ANY_ROWS, Form.EQUAL, Form.EQUAL),
        Rule(like(0), LINEAR, Form.EQUAL, Form.EQUAL),
        Rule(moved_size, Form.SHAPE, Form.EQUAL, Form.EQUAL),
    ),
    "GatherV2": (
        Rule(_looked_up, SAME, ROWS, Form.EQUAL),
        Rule(_of_each_sample, ANY_ROWS, Form.EQUAL, Form.EQUAL),
        Rule(_in_batches, ROWS, ROWS, Form.EQUAL),
        Rule(_of_places, Form.ROWS, Form.PLACES, Form.EQUAL),
        Rule(_shape_of_taken, _UNKNOWN_VALUES, ROWS, Form.EQUAL),
        Rule(moved_size, Form.SHAPE, Form.EQUAL, Form.EQUAL),
        Rule(like(0), LINEAR, Form.EQUAL, Form.EQUAL),
    ),
    "ResourceGather": (Rule(like(1), Form.EQUAL, ROWS),),
    "GatherNd": (
        Rule(_entries_found, SAME, ROWS),
        Rule(_picked_samples, Form.ROWS, Form.PLACES),
    ),
    "ResourceGatherNd": (Rule(_entries_found, Form.EQUAL, ROWS),),
    "Where": (Rule(_where, Form.ROWS),),
    "Slice": (
        Rule(_slice, ANY_ROWS, Form.EQUAL, Form.EQUAL),
        Rule(_slice_to_shape, Form.ROWS, Form.EQUAL, Form.SHAPE),
        Rule(moved_size, Form.SHAPE, Form.EQUAL, Form.EQUAL),
        Rule(like(0), LINEAR, Form.EQUAL, Form.EQUAL),
    ),
    "XlaDynamicUpdateSlice": (Rule(_updated, ANY_ROWS, ANY_ROWS, Form.EQUAL),),
}
