"""The kinds that products of matrices give."""

import dataclasses
import string

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
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import rules_of


def _letters(operation: tf.Operation) -> tuple[list[str], str] | None:
    """Returns a letter for each axis of the factors, and of their product.

    Axes of one entry, which is there for all along an axis, have none.
    """
    if operation.type == "Einsum":
        left, result = operation.get_attr("equation").decode().split("->")
        return None if "." in left else (left.split(","), result)
    ranks = [x.shape.rank for x in (*operation.inputs, *operation.outputs)]
    if None in ranks:
        return None
    names = ("adj_x", "adj_y")
    if operation.type == "MatMul":
        names = ("transpose_a", "transpose_b")
    leading = string.ascii_uppercase[: ranks[-1] - 2]
    terms = []
    given = operation.inputs
    for x, name, last in zip(given, names, ("ij", "jk"), strict=True):
        own = zip(leading[ranks[-1] - x.shape.rank :], x.shape, strict=False)
        first = [" " if size == 1 else letter for letter, size in own]
        is_turned = operation.get_attr(name)
        terms.append("".join(first) + (last[::-1] if is_turned else last))
    return terms, f"{leading}ik"


def _product(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a product of each sample's own, or one that sums over samples."""
    letters = _letters(operation)
    if letters is None:
        return None
    terms, result = letters
    of_rows = [i for i, kind in enumerate(inputs) if kind.role is Role.ROWS]
    labels = {terms[i][inputs[i].axis] for i in of_rows} - {" "}
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


def _added_up(inputs: list[Kind]) -> Kind | None:
    """Returns the kind of a sum over samples of products of their rows."""
    divided = sum(kind.divided for kind in inputs)
    whole = [dataclasses.replace(kind, divided=False) for kind in inputs]
    if divided > 1 or combined(whole, 0).mixed:
        return None
    return MEAN if divided else TOTAL


def _summed(_: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the gradient of a convolution by its filters.

    Of no images, as a part may have, TensorFlow does not always make zeros.
    """
    images, slopes = inputs[0], inputs[2]
    if images.axis or slopes.axis or not images.regular:
        return None
    return _added_up([images, slopes])


_STATISTIC = STATISTIC ^ Form.COUNT
_LINEAR = LINEAR ^ Form.COUNT
RULES: dict[str, tuple[Rule, ...]] = {
    **rules_of(
        "BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul",
        Rule(_product, ANY_ROWS, ANY_ROWS | SAME),
        Rule(_product, SAME, ANY_ROWS),
        Rule(like(0), _LINEAR, Form.EQUAL),
        Rule(like(1), Form.EQUAL, _LINEAR),
        Rule(beside_statistics(_product), ANY_ROWS, _STATISTIC),
        Rule(beside_statistics(_product), _STATISTIC, ANY_ROWS),
    ),
    **rules_of(
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 "
        "DepthwiseConv2dNativeBackpropFilter",
        Rule(_summed, ANY_ROWS, Form.EQUAL, ANY_ROWS),
    ),
    "Dilation2DBackpropFilter": (Rule(_summed, ROWS, Form.EQUAL, ANY_ROWS),),
    "Einsum": (Rule(_product, ANY_ROWS | SAME, ...),),
}
