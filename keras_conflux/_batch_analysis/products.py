"""The kinds that products of matrices give."""

import dataclasses

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import combined
from keras_conflux._batch_analysis.rule import ANY_ROWS
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import ROWS
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import STATISTIC
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import beside_statistics
from keras_conflux._batch_analysis.rule import has_one_entry
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import rules_of


def _have_ranks(operation: tf.Operation) -> bool:
    tensors = (*operation.inputs, *operation.outputs)
    return None not in [tensor.shape.rank for tensor in tensors]


def _place(operation: tf.Operation, position: int, axis: int) -> str:
    """Returns the role of an axis of one of a product's factors."""
    names = ("adj_x", "adj_y")
    if operation.type == "MatMul":
        names = ("transpose_a", "transpose_b")
    rank = operation.inputs[position].shape.rank
    first_is_summed = operation.get_attr(names[position]) ^ (position == 1)
    if axis < rank - 2:
        return "leading"
    return "summed" if (axis == rank - 2) == first_is_summed else "free"


def _axis_of_product(
    operation: tf.Operation, inputs: list[Kind], of_rows: list[int]
) -> int | None:
    """Returns the samples' axis in a product that keeps it."""
    output = operation.outputs[0]
    rank = output.shape.rank
    places = {_place(operation, i, inputs[i].axis) for i in of_rows}
    if places == {"free"} and len(of_rows) == 1:
        return rank - (2 if of_rows == [0] else 1)
    axes = {
        inputs[i].axis + rank - operation.inputs[i].shape.rank for i in of_rows
    }
    if places != {"leading"} or len(axes) > 1:
        return None
    axis = axes.pop()
    others = [x for i, x in enumerate(operation.inputs) if i not in of_rows]
    return axis if all(has_one_entry(x, output, axis) for x in others) else None


def _positions_of_rows(inputs: list[Kind]) -> list[int]:
    return [i for i, kind in enumerate(inputs) if kind.role is Role.ROWS]


def _rows_of_product(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind | None:
    """Follows a product of each sample's own."""
    if not _have_ranks(operation):
        return None
    of_rows = _positions_of_rows(inputs)
    axis = _axis_of_product(operation, inputs, of_rows) if of_rows else None
    if axis is None:
        return None
    if len(of_rows) == 1 and inputs[of_rows[0]].divided:
        return inputs[of_rows[0]].at(axis)
    return combined([inputs[i] for i in of_rows], axis)


def _sum_over_samples(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind | None:
    """Follows a product that sums over samples."""
    if not _have_ranks(operation):
        return None
    places = {_place(operation, i, kind.axis) for i, kind in enumerate(inputs)}
    return _added_up(inputs) if places == {"summed"} else None


def _added_up(inputs: list[Kind]) -> Kind | None:
    """Returns the kind of a sum over samples of products of their rows."""
    divided = sum(kind.divided for kind in inputs)
    whole = [dataclasses.replace(kind, divided=False) for kind in inputs]
    if divided > 1 or combined(whole, 0).mixed:
        return None
    return MEAN if divided else TOTAL


def _sum_of_filters(_: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the gradient of a convolution by its filters.

    Of no images, which a part may have where each sample has some, TensorFlow
    does not always make zeros.
    """
    images, slopes = inputs[0], inputs[2]
    if images.axis or slopes.axis or not images.regular:
        return None
    return _added_up([images, slopes])


def _einsum(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    equation = operation.get_attr("equation").decode()
    if "." in equation:
        return None
    left, result = equation.split("->")
    terms = left.split(",")
    of_rows = _positions_of_rows(inputs)
    labels = {terms[i][inputs[i].axis] for i in of_rows}
    label = labels.pop() if len(labels) == 1 else None
    if label is None or not all(
        term.count(label) == (i in of_rows) for i, term in enumerate(terms)
    ):
        return None
    kinds = [inputs[i] for i in of_rows]
    if label in result:
        found = combined(kinds, result.index(label))
        is_scaled = len(kinds) == 1 and kinds[0].divided
        return kinds[0].at(found.axis) if is_scaled else found
    return _added_up(kinds)


_STATISTIC = STATISTIC ^ Form.COUNT
_LINEAR = LINEAR ^ Form.COUNT
RULES: dict[str, tuple[Rule, ...]] = {
    **rules_of(
        "BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul",
        Rule(_rows_of_product, ANY_ROWS, ANY_ROWS | SAME),
        Rule(_rows_of_product, SAME, ANY_ROWS),
        Rule(_sum_over_samples, ANY_ROWS, ANY_ROWS),
        Rule(like(0), _LINEAR, Form.EQUAL),
        Rule(like(1), Form.EQUAL, _LINEAR),
        Rule(beside_statistics(_rows_of_product), ANY_ROWS, _STATISTIC),
        Rule(beside_statistics(_rows_of_product), _STATISTIC, ANY_ROWS),
    ),
    **rules_of(
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 "
        "DepthwiseConv2dNativeBackpropFilter",
        Rule(_sum_of_filters, ANY_ROWS, Form.EQUAL, ANY_ROWS),
    ),
    "Dilation2DBackpropFilter": (
        Rule(_sum_of_filters, ROWS, Form.EQUAL, ANY_ROWS),
    ),
    "Einsum": (Rule(_einsum, ANY_ROWS | SAME, ...),),
}
