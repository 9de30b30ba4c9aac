"""The kinds that operations on each entry give."""

import dataclasses
import itertools

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import LINEAR_ROLES
from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import aligned
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.kinds import COUNT
from keras_conflux._fit.global_batch.kinds import COUNTED
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import MEAN
from keras_conflux._fit.global_batch.kinds import TOTAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import combined


def elementwise(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    output = operation.outputs[0]
    of_rows = [
        (tensor, kind)
        for tensor, kind in zip(operation.inputs, inputs, strict=False)
        if kind.role is Role.ROWS
    ]
    if not of_rows:
        return of_any(operation, output, inputs)
    axes = {aligned(tensor, kind, output) for tensor, kind in of_rows}
    derived = [
        tensor
        for tensor, kind in zip(operation.inputs, inputs, strict=False)
        if kind.role is Role.DERIVED
    ]
    if any(_has_open_axis(tensor) for tensor in derived):
        return DERIVED  # as a matrix that compares each sample with each
    if len(axes) > 1 and None not in axes:
        return DERIVED
    mixing = (Role.TOTAL, Role.MEAN, Role.COUNT, Role.DERIVED)
    return combined(
        [kind for _, kind in of_rows],
        axes.pop() if len(axes) == 1 else None,
        mixed=any(kind.role in mixing for kind in inputs),
    )


def _has_open_axis(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is None or None in tensor.shape.as_list()


def sum_of(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Adds, subtracts or packs."""
    roles = {kind.role for kind in inputs}
    if len(set(inputs)) == 1 and roles <= {Role.TOTAL, Role.COUNT}:
        return inputs[0]
    if roles <= {Role.TOTAL, Role.COUNT}:
        # A stand-in adds nothing, but its copies have what it has counted.
        return DERIVED if COUNTED in inputs else TOTAL
    if roles <= {Role.MEAN, Role.EQUAL}:
        return MEAN
    return elementwise(operation, inputs)


def _product(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    roles = [kind.role for kind in inputs]
    for one, other in itertools.permutations(inputs, 2):
        if one.role in LINEAR_ROLES and other == EQUAL:
            return one
    if set(roles) == {Role.MEAN, Role.COUNT}:
        return TOTAL
    return _divided(inputs, EQUAL) or elementwise(operation, inputs)


def _divided(inputs: list[Kind], by: Kind) -> Kind | None:
    """Returns the kind of rows that have been, or are, divided by a COUNT."""
    for one, other in itertools.permutations(inputs, 2):
        is_divided = one.divided if by == EQUAL else not one.divided
        if one.role is Role.ROWS and other == by and is_divided:
            return dataclasses.replace(one, divided=True)
    return None


def _quotient(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    above, below = inputs
    if above.role in LINEAR_ROLES and below == EQUAL:
        return above
    if below.role is Role.COUNT and above.role is Role.COUNT:
        return EQUAL
    if below.role is Role.COUNT and above.role is Role.TOTAL:
        return DERIVED if above == COUNTED else MEAN
    if below in (COUNT, EQUAL):
        result = _divided([above, below], below)
        if result is not None:
            return result
    return elementwise(operation, inputs)


def _same(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Keeps what its first input is."""
    del operation
    return inputs[0]


def _each_same(operation: tf.Operation, inputs: list[Kind]) -> list[Kind]:
    return inputs[: len(operation.outputs)]


def _cast(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    before, after = operation.inputs[0].dtype, operation.outputs[0].dtype
    rounds = before.is_floating and not after.is_floating
    if not rounds and not after.is_bool:
        return inputs[0]
    if inputs[0].role in LINEAR_ROLES:
        return DERIVED
    return elementwise(operation, inputs) if inputs[0].divided else inputs[0]


def _select(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    condition, *chosen = inputs
    if condition == EQUAL:
        roles = {kind.role for kind in chosen}
        if roles == {Role.TOTAL} or roles <= {Role.MEAN, Role.EQUAL}:
            if len(set(chosen)) == 1:
                return chosen[0]
            return DERIVED if COUNTED in chosen else MEAN
    return elementwise(operation, inputs)


_ENTRY_BY_ENTRY = (
    "Abs Acos Acosh Asin Asinh Atan Atan2 Atanh Ceil ClipByValue Cos Cosh "
    "Digamma Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod "
    "Greater GreaterEqual Inv IsFinite IsInf IsNan LeakyRelu Less LessEqual "
    "Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod "
    "NextAfter NotEqual OnesLike Pow Reciprocal Relu Relu6 Rint Round Rsqrt "
    "Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square "
    "SquaredDifference Tan Tanh TruncateDiv Xdivy Xlogy ZerosLike "
    "BitwiseAnd BitwiseOr BitwiseXor TruncateMod"
)
_UNCHANGED = (
    "Identity Neg StopGradient PreventGradient EnsureShape Snapshot "
    "CheckNumerics DebugIdentityV2 DebugIdentityV3"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ENTRY_BY_ENTRY.split(), elementwise),
    **dict.fromkeys(_UNCHANGED.split(), _same),
    **dict.fromkeys(("Add", "AddV2", "Sub", "AddN"), sum_of),
    **dict.fromkeys(("Mul", "MulNoNan"), _product),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), _quotient),
    **dict.fromkeys(("Select", "SelectV2"), _select),
    "IdentityN": _each_same,
    "Cast": _cast,
}
