"""The kinds that functions, branches, loops and their lists give.

The kind of a list of tensors is that of each of its elements.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import recomputed
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import MEAN
from keras_conflux._fit.global_batch.kinds import OPAQUE
from keras_conflux._fit.global_batch.kinds import TOTAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role

CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
BRANCHES = frozenset(("If", "StatelessIf"))
CASES = frozenset(("Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))

_KindsOf = Callable[[tf.Operation, list[Kind]], list[Kind]]
Marked = Callable[[tf.Tensor], Kind | None]
"""Returns what somebody has said that a tensor is."""


def of_call(
    operation: tf.Operation, inputs: list[Kind], kinds_of: _KindsOf
) -> list[Kind]:
    """Follows the kinds through the body of a function."""
    found = _of_body(_body(operation, "f"), inputs, kinds_of)
    return found or [OPAQUE] * len(operation.outputs)


def of_branches(
    operation: tf.Operation,
    inputs: list[Kind],
    kinds_of: _KindsOf,
    marked: Marked,
) -> list[Kind]:
    """Follows the kinds through both branches of a condition.

    A branch is run in one place, so what is said of its tensors holds there.
    """
    condition, *given = inputs
    bodies = [_body(operation, name) for name in ("then_branch", "else_branch")]
    branches = [_of_body(body, given, kinds_of, marked) for body in bodies]
    if None in branches:
        return [OPAQUE] * len(operation.outputs)
    results = [
        TOTAL if _are_total(kinds, tensors) else _either(*kinds)
        for kinds, tensors in zip(
            zip(*branches, strict=True),
            zip(*(body.outputs for body in bodies), strict=True),
            strict=True,
        )
    ]
    return results if condition == EQUAL else _chosen(results)


def _are_total(kinds: tuple[Kind, ...], tensors: tuple[tf.Tensor, ...]) -> bool:
    """Whether one branch gives a sum over samples, and the other one zero."""
    return TOTAL in kinds and all(
        kind == TOTAL or (kind == EQUAL and _is_zero(tensor))
        for kind, tensor in zip(kinds, tensors, strict=True)
    )


def _is_zero(tensor: tf.Tensor) -> bool:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    value = tf.get_static_value(tensor)
    return value is not None and bool((value == 0).all())


def of_loop(
    operation: tf.Operation, inputs: list[Kind], kinds_of: _KindsOf
) -> list[Kind]:
    """Follows the kinds through a loop until they stay what they are."""
    unknown = [OPAQUE] * len(operation.outputs)
    kinds = inputs
    for _ in range(5):
        found = _of_body(_body(operation, "body"), kinds, kinds_of)
        if found is None:
            return unknown
        found = [
            _written(a, b) if output.dtype == tf.variant else _either(a, b)
            for a, b, output in zip(
                kinds, found, operation.outputs, strict=True
            )
        ]
        if found == kinds:
            break
        kinds = found
    else:
        return unknown
    going_on = _of_body(_body(operation, "cond"), kinds, kinds_of)
    return kinds if going_on == [EQUAL] else _chosen(kinds)


def _body(operation: tf.Operation, attribute: str) -> Any:
    return tensorflow_graphs.function_named(
        operation.graph, operation.get_attr(attribute).name
    )


def _of_body(
    body: Any,
    inputs: list[Kind],
    kinds_of: _KindsOf,
    marked: Marked | None = None,
) -> list[Kind] | None:
    if body is None or len(body.inputs) != len(inputs):
        return None
    known = {
        placeholder.name: kind
        for placeholder, kind in zip(body.inputs, inputs, strict=True)
    }
    written: dict[str, Kind] = {}
    for inner in body.get_operations():
        if inner.type == "Placeholder":
            continue
        kinds = [known.get(tensor.name, OPAQUE) for tensor in inner.inputs]
        if inner.type == "AssignVariableOp":
            written[inner.inputs[0].name] = kinds[1]
        outputs = kinds_of(inner, kinds)
        if inner.type == "ReadVariableOp":
            outputs = [written.get(inner.inputs[0].name, outputs[0])]
        for tensor, kind in zip(inner.outputs, outputs, strict=False):
            said = marked(tensor) if marked is not None else None
            known[tensor.name] = said or kind
    return [known.get(tensor.name, OPAQUE) for tensor in body.outputs]


def _either(one: Kind, other: Kind) -> Kind:
    """Returns the kind of what is one or the other, on all replicas alike."""
    if one == other:
        return one
    roles = {one.role, other.role}
    if Role.OPAQUE in roles or Role.RANDOM in roles:
        return OPAQUE
    if roles == {Role.MEAN, Role.EQUAL}:
        return MEAN
    if roles == {Role.ROWS} and one.axis == other.axis:
        regular = one.regular and other.regular and one.blocks == other.blocks
        return dataclasses.replace(one, mixed=True, regular=regular)
    return DERIVED if None not in (_axis(one), _axis(other)) else OPAQUE


def _axis(kind: Kind) -> int | None:
    return kind.axis if kind.role is Role.ROWS else 0


def _written(old: Kind, new: Kind) -> Kind:
    """Returns the kind of a list to which something is written."""
    return new if old == EQUAL else _either(old, new)


def _chosen(kinds: list[Kind]) -> list[Kind]:
    """Returns the kinds of what each replica chooses by its own samples."""
    return [
        dataclasses.replace(kind, mixed=True)
        if kind.role is Role.ROWS
        else kind
        if kind.role is Role.OPAQUE
        else DERIVED
        for kind in kinds
    ]


def _from_tensor(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    if kind.role is Role.ROWS and kind.axis:
        return kind.at(kind.axis - 1)
    return recomputed(operation, inputs)


def _stack(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind, *others = inputs
    if set(others) <= {EQUAL} and kind.role is Role.ROWS:
        return kind.at(None if kind.axis is None else kind.axis + 1)
    return recomputed(operation, inputs)


def _item(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind, index, _ = inputs
    return kind if index == EQUAL else recomputed(operation, inputs)


def _set_item(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind, index, item = inputs
    if index != EQUAL:
        return recomputed(operation, inputs)
    return _written(kind, item)


def _push(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    del operation
    return _written(*inputs)


def _pop(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    del operation
    return inputs[0]


def _length(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    return EQUAL if kind.role is Role.ROWS else recomputed(operation, inputs)


RULES: dict[str, Rule] = {
    "TensorListFromTensor": _from_tensor,
    "TensorListStack": _stack,
    "TensorListGetItem": _item,
    "TensorListSetItem": _set_item,
    "TensorListPushBack": _push,
    "TensorListPopBack": _pop,
    "TensorListLength": _length,
}
