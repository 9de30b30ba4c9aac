"""The kinds of shapes and sizes, and of tensors made from them."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import count
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.kinds import shape
from keras_conflux._batch_analysis.rule import ANY_ROWS
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import MOVES
from keras_conflux._batch_analysis.rule import ROWS
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import STATISTIC
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import aligned
from keras_conflux._batch_analysis.rule import always
from keras_conflux._batch_analysis.rule import beside_statistics
from keras_conflux._batch_analysis.rule import has_one_entry
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import rules_of
from keras_conflux._batch_analysis.rule import shape_alone
from keras_conflux._batch_analysis.rule import static_value


def _shape_of(operation: tf.Operation, inputs: list[Kind]) -> list[Kind]:
    return [
        shape(kind.axis, kind.regular)
        if kind.role is Role.ROWS
        else _of_no_samples(tensor, kind)
        for tensor, kind in zip(operation.inputs, inputs, strict=True)
    ]


def _size_of(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    if inputs[0].role is Role.ROWS:
        return count(inputs[0].regular)
    return _of_no_samples(operation.inputs[0], inputs[0])


def _of_no_samples(tensor: tf.Tensor, kind: Kind) -> Kind:
    """Returns the kind of a size, which may itself depend on draws."""
    is_open = kind == RANDOM and not tensor.shape.is_fully_defined()
    return RANDOM if is_open else EQUAL


def moved_size(
    operation: tf.Operation, inputs: list[Kind]
) -> list[Kind | None] | None:
    """Follows a number of samples to its place among other sizes."""
    given = [*map(_entries, operation.inputs, inputs)]
    if any(x is None for x in given):
        return None
    try:
        found = MOVES[operation.type](operation, *given)
    except (IndexError, TypeError, ValueError):  # as of unknown numbers
        return None
    regular = all(kind.regular for kind in inputs)
    parts = found if isinstance(found, list) else [found]
    kinds = [_of_entries(each, regular) for each in parts]
    return None if None in kinds else kinds


def _entries(tensor: Any, kind: Kind) -> Any:
    """Returns the entries of sizes; those that are not known are `None`."""
    known = static_value(tensor) if kind == EQUAL else None
    if known is not None or not tensor.shape.is_fully_defined():
        return known
    found = np.full(tensor.shape, None)
    if kind != EQUAL:
        found[kind.axis if kind.role is Role.SHAPE else ...] = Role.COUNT
    return found


def _of_entries(entries: Any, regular: bool) -> Kind | None:
    """Returns the kind of some sizes, or of one."""
    entries = np.asarray(entries, object)
    places = np.argwhere(entries == Role.COUNT)
    if not len(places):
        return EQUAL
    if len(places) > 1 or entries.ndim > 1:
        return None
    return shape(int(places[0, 0]), regular) if entries.ndim else count(regular)


def _rows_of(sizes: Kind) -> Kind:
    """Returns the kind of rows that are as many as a shape says."""
    return Kind(Role.ROWS, sizes.axis, sizes.entries)


def _filled(_: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `fill(shape, value)`."""
    return _rows_of(inputs[0])


def _broadcast_rows(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `broadcast_to(rows, shape)` if both have the same samples."""
    value, sizes = inputs
    axis = aligned(operation.inputs[0], value, operation.outputs[0])
    return value.at(sizes.axis) if axis == sizes.axis else None


def _broadcast(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `broadcast_to(value, shape)` of values without samples."""
    tensor, output = operation.inputs[0], operation.outputs[0]
    if output.shape.rank is None:
        return None
    is_broadcast = has_one_entry(tensor, output, inputs[1].axis)
    return _rows_of(inputs[1]) if is_broadcast else None


def _tile(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a repetition of the entries of each sample."""
    known = tf.get_static_value(operation.inputs[1], partial=True)
    kind = inputs[0]
    return kind if known is not None and known[kind.axis] == 1 else None


def _tiled_by_shape(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `tile(value, [n, 1])` of values without samples."""
    is_static = operation.inputs[0].shape.is_fully_defined()
    return _rows_of(inputs[1]) if is_static else None


def _range(operation: tf.Operation, _: list[Kind]) -> Kind | None:
    """Follows the shape of the positions of samples."""
    begin, step = (static_value(operation.inputs[i]) for i in (0, 2))
    is_exact = operation.outputs[0].dtype.is_integer
    if begin != 0 or step != 1 or not is_exact:
        return None
    return mixed_rows([Kind(Role.ROWS, entries=Entries.SAME)], 0)


_SIZES = Rule(_shape_of, ANY_ROWS | Form.PLACES | LINEAR | SAME, ...)
RULES: dict[str, tuple[Rule, ...]] = {
    **rules_of("Shape ShapeN", _SIZES),
    "Size": (Rule(_size_of, ANY_ROWS | Form.PLACES | LINEAR | Form.RANDOM),),
    "Rank": (Rule(always(EQUAL), ~Form.OPAQUE),),
    "Fill": (
        Rule(_filled, Form.SHAPE, SAME),
        Rule(shape_alone(_filled), Form.SHAPE, STATISTIC),
    ),
    "Empty": (Rule(_filled, Form.SHAPE),),
    "BroadcastTo": (
        Rule(_broadcast_rows, ROWS, Form.SHAPE),
        Rule(_broadcast, SAME, Form.SHAPE),
        Rule(beside_statistics(_broadcast), STATISTIC, Form.SHAPE),
        Rule(like(0), LINEAR, Form.EQUAL),
    ),
    "Tile": (
        Rule(_tile, ANY_ROWS, Form.EQUAL),
        Rule(like(0), LINEAR, Form.EQUAL),
        Rule(_tiled_by_shape, SAME, Form.SHAPE),
        Rule(shape_alone(_tiled_by_shape), STATISTIC, Form.SHAPE),
    ),
    "Range": (Rule(_range, Form.EQUAL, Form.COUNT, Form.EQUAL),),
}
