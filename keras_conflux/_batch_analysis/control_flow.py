"""The kinds of the results of functions, branches, loops and lists.

The kind of a list of tensors is the kind of each of its elements.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import one_of_rows
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import always
from keras_conflux._batch_analysis.rule import is_zero
from keras_conflux._graphs import bodies

KindsOf = Callable[[tf.Operation, list[Kind]], list[Kind]]
"""Returns the kinds of an operation's outputs, by its inputs' kinds."""
Marked = Callable[[tf.Tensor], Kind | None]
"""Returns the kind that was set for a tensor."""


def of_call(
    operation: tf.Operation, inputs: list[Kind], kinds_of: KindsOf
) -> list[Kind]:
    """Follows the kinds through the body of a function."""
    found = _of_body(_body(operation, "f"), inputs, kinds_of)
    return found or [OPAQUE] * len(operation.outputs)


def of_branches(
    operation: tf.Operation,
    inputs: list[Kind],
    kinds_of: KindsOf,
    marked: Marked,
) -> list[Kind]:
    """Follows the kinds through both branches of a condition.

    A branch is run in one place, so kinds set for its tensors hold there.
    """
    condition, *given = inputs
    inside = [_body(operation, name) for name in ("then_branch", "else_branch")]
    branches = [_of_body(body, given, kinds_of, marked) for body in inside]
    if None in branches:
        return [OPAQUE] * len(operation.outputs)
    results = [
        TOTAL if _are_total(kinds, tensors) else _either(*kinds)
        for kinds, tensors in zip(
            zip(*branches, strict=True),
            zip(*(body.outputs for body in inside), strict=True),
            strict=True,
        )
    ]
    return results if condition == EQUAL else _chosen(results)


def _are_total(kinds: tuple[Kind, ...], tensors: tuple[tf.Tensor, ...]) -> bool:
    """Whether one branch gives a sum over samples, and the other one zero."""
    return TOTAL in kinds and all(
        kind == TOTAL or (kind == EQUAL and is_zero(tensor))
        for kind, tensor in zip(kinds, tensors, strict=True)
    )


def of_loop(
    operation: tf.Operation, inputs: list[Kind], kinds_of: KindsOf
) -> list[Kind]:
    """Follows the kinds through a loop."""
    kinds = of_turns(operation, inputs, kinds_of)
    if kinds is None:
        return [OPAQUE] * len(operation.outputs)
    alike = _goes_on_alike(operation, kinds, kinds_of)
    return kinds if alike else _chosen(kinds)


def chooses_alike(
    operation: tf.Operation, inputs: list[Kind], kinds_of: KindsOf
) -> bool:
    """Whether replicas choose one branch, or as many turns of a loop."""
    if operation.type in bodies.LOOPS:
        kinds = of_turns(operation, inputs, kinds_of)
        return kinds is not None and _goes_on_alike(operation, kinds, kinds_of)
    chooses = operation.type in bodies.BRANCHES | bodies.CASES
    return not chooses or inputs[0] == EQUAL


def _goes_on_alike(
    operation: tf.Operation, kinds: list[Kind], kinds_of: KindsOf
) -> bool:
    return _of_body(_body(operation, "cond"), kinds, kinds_of) == [EQUAL]


def of_turns(
    operation: tf.Operation, inputs: list[Kind], kinds_of: KindsOf
) -> list[Kind] | None:
    """Follows the kinds through a loop.

    A sum over samples that begins with zero is one in each turn.
    """
    found = _followed(operation, inputs, kinds_of)
    begun = [
        TOTAL if (old, kind) == (EQUAL, DERIVED) and is_zero(tensor) else old
        for tensor, old, kind in zip(
            operation.inputs, inputs, found or inputs, strict=True
        )
    ]
    while begun != inputs:
        kinds = _followed(operation, begun, kinds_of) or inputs
        kept = [
            given if kind == TOTAL else old
            for old, given, kind in zip(inputs, begun, kinds, strict=True)
        ]
        if kept == begun:
            return kinds
        begun = kept
    return found


def _followed(
    operation: tf.Operation, inputs: list[Kind], kinds_of: KindsOf
) -> list[Kind] | None:
    """Follows the kinds through turns until they do not change."""
    kinds = inputs
    for _ in range(len(inputs) + 3):  # as one may follow from the one before
        found = _of_body(_body(operation, "body"), kinds, kinds_of)
        if found is None:
            return None
        found = [*map(_written, operation.inputs, kinds, found)]
        if found == kinds:
            return kinds
        kinds = found
    return None


def _body(operation: tf.Operation, attribute: str) -> Any:
    name = operation.get_attr(attribute).name
    return bodies.function_named(operation.graph, name)


def _of_body(
    body: Any,
    inputs: list[Kind],
    kinds_of: KindsOf,
    marked: Marked = lambda tensor: None,
) -> list[Kind] | None:
    if body is None or len(body.inputs) != len(inputs):
        return None
    known = {x.name: k for x, k in zip(body.inputs, inputs, strict=True)}
    written: dict[str, Kind] = {}
    for inner in body.get_operations():
        if inner.type == "Placeholder":
            continue
        kinds = [known.get(tensor.name, OPAQUE) for tensor in inner.inputs]
        if inner.type == "AssignVariableOp":
            written[inner.inputs[0].name] = kinds[1]
        outputs = kinds_of(inner, kinds)
        if inner.type == "ReadVariableOp":
            outputs = [written.get(inner.inputs[0].name, kinds[0])]
        for tensor, kind in zip(inner.outputs, outputs, strict=False):
            known[tensor.name] = marked(tensor) or kind
    return [known.get(tensor.name, OPAQUE) for tensor in body.outputs]


def _either(one: Kind, other: Kind) -> Kind:
    """Returns the kind of one value or the other, alike on all replicas."""
    if one == other:
        return one
    roles = {one.role, other.role}
    if Role.OPAQUE in roles or Role.RANDOM in roles:
        return OPAQUE
    if roles == {Role.MEAN, Role.EQUAL}:
        return MEAN
    if roles == {Role.ROWS} and one.axis == other.axis:
        return one_of_rows(one, other)
    return DERIVED


def _written(before: tf.Tensor, old: Kind, new: Kind) -> Kind:
    """Returns the kind of a value, or of a list to which something is written.

    A list that is an argument of a loop's body is taken for one that has no
    elements yet; those that have are found where they go into the loop.
    """
    is_empty = before.dtype == tf.variant and before.op.type in _EMPTY
    return new if old == EQUAL and is_empty else _either(old, new)


def _chosen(kinds: list[Kind]) -> list[Kind]:
    """Returns the kinds of values that each replica chooses by its samples."""
    return [OPAQUE if kind.role is Role.OPAQUE else DERIVED for kind in kinds]


def _from_tensor(_: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Makes a list of the entries along the first axis."""
    return inputs[0].at(inputs[0].axis - 1) if inputs[0].axis else None


def _first(_: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Takes an element of a list: zeros of a shape, if it has none yet."""
    is_of_rows = inputs[0].role is Role.ROWS
    is_told = is_of_rows or inputs[-1].role is not Role.SHAPE
    return inputs[0] if is_told else None


def _put(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    return _written(operation.inputs[0], inputs[0], inputs[-1])


_EMPTY = ("EmptyTensorList", "Placeholder", "TensorListReserve")
_KNOWN = ~Form.OPAQUE
_ELEMENT = ~(Form.OPAQUE | Form.DERIVED)
_SIZES = Form.EQUAL | Form.SHAPE
RULES: dict[str, tuple[Rule, ...]] = {
    "TensorListFromTensor": (Rule(_from_tensor, Form.ROWS, Form.EQUAL),),
    "TensorListStack": (
        Rule(lambda _, x: x[0].at(x[0].axis + 1), Form.ROWS, _SIZES),
    ),
    "TensorListGetItem": (Rule(_first, _ELEMENT, Form.EQUAL, _SIZES),),
    "TensorListSetItem": (Rule(_put, _ELEMENT, Form.EQUAL, _KNOWN),),
    "TensorListPushBack": (Rule(_put, _ELEMENT, _KNOWN),),
    "TensorListPopBack": (Rule(_first, _ELEMENT, SAME | Form.SHAPE),),
    "TensorListLength": (Rule(always(EQUAL), Form.ROWS),),
}
