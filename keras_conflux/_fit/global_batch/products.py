"""The kinds that products of matrices give."""

import dataclasses

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import MEAN
from keras_conflux._fit.global_batch.kinds import TOTAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import combined


def _matmul(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    output = operation.outputs[0]
    if None in [x.shape.rank for x in (*operation.inputs, output)]:
        return of_any(operation, output, inputs)
    of_rows = [i for i, kind in enumerate(inputs) if kind.role is Role.ROWS]
    if not of_rows:
        if any(kind in (TOTAL, MEAN) for kind in inputs) and EQUAL in inputs:
            return next(kind for kind in inputs if kind != EQUAL)
        return of_any(operation, output, inputs)
    if any(kind.role is Role.DERIVED for kind in inputs):
        return DERIVED
    if any(inputs[i].axis is None for i in of_rows):
        return combined([inputs[i] for i in of_rows], None)
    return _product_of_rows(operation, inputs, of_rows)


def _product_of_rows(
    operation: tf.Operation, inputs: list[Kind], of_rows: list[int]
) -> Kind:
    """Returns the kind where the samples' axes are known."""
    rank = operation.outputs[0].shape.rank
    apart = all(
        kind.role in (Role.ROWS, Role.EQUAL, Role.RANDOM) for kind in inputs
    )
    places = [_place(operation, i, inputs[i].axis) for i in of_rows]
    found = [
        inputs[i] if apart else dataclasses.replace(inputs[i], mixed=True)
        for i in of_rows
    ]
    if places == ["free"]:
        return combined(found, rank - (2 if of_rows == [0] else 1))
    if set(places) == {"leading"}:
        missing = rank - operation.inputs[of_rows[0]].shape.rank
        return combined(found, (found[0].axis or 0) + missing)
    if places == ["summed", "summed"] and not any(
        x.mixed or x.places for x in found
    ):
        return (TOTAL, MEAN, DERIVED)[sum(kind.divided for kind in found)]
    return DERIVED


def _place(operation: tf.Operation, position: int, axis: int | None) -> str:
    """Returns what a product does with an axis of one of its factors."""
    names = ("transpose_a", "transpose_b")
    if operation.type != "MatMul":
        names = ("adj_x", "adj_y")
    rank = operation.inputs[position].shape.rank
    first_is_summed = operation.get_attr(names[position]) ^ (position == 1)
    if axis is not None and axis < rank - 2:
        return "leading"
    return "summed" if (axis == rank - 2) == first_is_summed else "free"


def _einsum(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    equation = operation.get_attr("equation").decode()
    output = operation.outputs[0]
    if "." in equation:
        return of_any(operation, output, inputs)
    left, right = equation.split("->")
    labels = set()
    for term, kind in zip(left.split(","), inputs, strict=True):
        if kind.role is Role.ROWS:
            labels.add(None if kind.axis is None else term[kind.axis])
    of_rows = [kind for kind in inputs if kind.role is Role.ROWS]
    others = {k.role for k in inputs} - {Role.ROWS}
    if not labels or others - {Role.EQUAL, Role.RANDOM}:
        return of_any(operation, output, inputs)
    if None in labels:
        return combined(of_rows, None)
    if len(labels) > 1:
        return DERIVED
    label = labels.pop()
    if label in right:
        return combined(of_rows, right.index(label))
    mixed = combined(of_rows, None).mixed
    return DERIVED if mixed or len(inputs) == 1 else TOTAL


RULES: dict[str, Rule] = {
    **dict.fromkeys(("MatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    "Einsum": _einsum,
}
