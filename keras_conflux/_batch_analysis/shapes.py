"""The kinds of shapes and sizes, and of tensors made from them."""

import tensorflow as tf

from keras_conflux._batch_analysis.constants import static_value
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import count
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.kinds import shape
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import aligned
from keras_conflux._batch_analysis.rule import has_one_entry

_ROWS = Form.ROWS | Form.JOINED | Form.DIVIDED
_ROWS_AND_PLACES = _ROWS | Form.PLACES
_STATISTIC = Form.TOTAL | Form.COUNTED | Form.MEAN | Form.DERIVED


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


def _rank_of(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    del operation, inputs
    return EQUAL


def _rows_of(sizes: Kind) -> Kind:
    """Returns the kind of rows that are as many as a shape says."""
    return Kind(Role.ROWS, sizes.axis, sizes.entries)


def _filled(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `fill(shape, value)`."""
    del operation
    return _rows_of(inputs[0])


def _filled_with_a_statistic(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind:
    del operation
    return mixed_rows([_rows_of(inputs[0])], inputs[0].axis)


def _broadcast_rows(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `broadcast_to(rows, shape)` if both have the same samples."""
    value, sizes = inputs
    axis = aligned(operation.inputs[0], value, operation.outputs[0])
    return value.at(sizes.axis) if axis == sizes.axis else None


def _broadcast(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `broadcast_to(value, shape)` of values without samples."""
    value, sizes = inputs
    tensor, output = operation.inputs[0], operation.outputs[0]
    if output.shape.rank is None:
        return None
    if not has_one_entry(tensor, output, sizes.axis):
        return None
    found = _rows_of(sizes)
    if value.role in (Role.EQUAL, Role.RANDOM):
        return found
    is_static = tensor.shape.is_fully_defined()
    return mixed_rows([found], sizes.axis) if is_static else None


def _repeated(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `broadcast_to(value, shape)` where replicas repeat it alike."""
    del operation
    return inputs[0]


def _tiled_by_a_shape(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind | None:
    """Follows `tile(value, [n, 1])` of values without samples."""
    value, times = inputs
    tensor = operation.inputs[0]
    if tensor.shape.rank is None or not tensor.shape.is_fully_defined():
        return None
    found = _rows_of(times)
    if value.role in (Role.EQUAL, Role.RANDOM):
        return found
    return mixed_rows([found], times.axis)


def _range(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the shape of the positions of samples."""
    del inputs
    begin, step = (static_value(operation.inputs[i]) for i in (0, 2))
    is_exact = operation.outputs[0].dtype.is_integer
    if begin != 0 or step != 1 or not is_exact:
        return None
    return mixed_rows([Kind(Role.ROWS, entries=Entries.SAME)], 0)


_BY_A_SHAPE = (
    Rule(_broadcast, SAME, Form.SHAPE),
    Rule(_broadcast, _STATISTIC | Form.COUNT, Form.SHAPE),
)
RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(
        ("Shape", "ShapeN"),
        (Rule(_shape_of, _ROWS_AND_PLACES | LINEAR | SAME, ...),),
    ),
    "Size": (Rule(_size_of, _ROWS_AND_PLACES | LINEAR | Form.RANDOM),),
    "Rank": (Rule(_rank_of, ~Form.OPAQUE),),
    "Fill": (
        Rule(_filled, Form.SHAPE, SAME),
        Rule(_filled_with_a_statistic, Form.SHAPE, _STATISTIC | Form.COUNT),
    ),
    "BroadcastTo": (
        Rule(_broadcast_rows, Form.ROWS | Form.JOINED, Form.SHAPE),
        *_BY_A_SHAPE,
        Rule(_repeated, LINEAR, Form.EQUAL),
    ),
    "Range": (Rule(_range, Form.EQUAL, Form.COUNT, Form.EQUAL),),
}
TILED = (
    Rule(_tiled_by_a_shape, SAME, Form.SHAPE),
    Rule(_tiled_by_a_shape, _STATISTIC | Form.COUNT, Form.SHAPE),
)
