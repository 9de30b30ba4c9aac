"""The kinds that operations on each entry give."""

import dataclasses
import itertools

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import EQUAL
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
from keras_conflux._batch_analysis.rule import aligned
from keras_conflux._batch_analysis.rule import always
from keras_conflux._batch_analysis.rule import beside_statistics
from keras_conflux._batch_analysis.rule import has_one_entry
from keras_conflux._batch_analysis.rule import is_zero
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import rows_among
from keras_conflux._batch_analysis.rule import rules_of


def _axis(operation: tf.Operation, inputs: list[Kind]) -> int | None:
    """Returns the axis of the samples, if it is one for all inputs.

    An input without samples is the same for all of them.
    """
    output = operation.outputs[0]
    given = list(zip(operation.inputs, inputs, strict=True))
    axes = {aligned(x, k, output) for x, k in given if k.role is Role.ROWS}
    axis = axes.pop() if len(axes) == 1 else None
    if axis is None or not all(
        kind.role is Role.ROWS or has_one_entry(tensor, output, axis)
        for tensor, kind in given
    ):
        return None
    return axis


def entry_by_entry(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows an operation on entries at the same place."""
    axis = _axis(operation, inputs)
    return None if axis is None else combined(rows_among(inputs), axis)


ENTRY_BY_ENTRY = (
    Rule(entry_by_entry, ROWS | SAME, ...),
    Rule(beside_statistics(entry_by_entry), ANY_ROWS | SAME | STATISTIC, ...),
)


unchanged = like(0)
"""The claim of operations that return each entry in its place."""


def _total(_: tf.Operation, inputs: list[Kind]) -> Kind:
    return inputs[0] if len(set(inputs)) == 1 else TOTAL


SUMS = (
    Rule(like(0), Form.COUNTED, ...),
    Rule(_total, Form.TOTAL | Form.COUNT, ...),
    Rule(always(MEAN), Form.MEAN | Form.EQUAL, ...),
)
"""The rules of adding, subtracting or joining numbers without samples."""


def _scaled(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a product of which one factor is equal on all replicas."""
    for one, other in itertools.permutations(inputs, 2):
        if other == EQUAL and one.role is not Role.ROWS:
            return one
        if other == EQUAL:
            axis = _axis(operation, inputs)
            return None if axis is None else one.at(axis)
    return None


def _divided(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    axis = _axis(operation, inputs)
    if axis is None or operation.inputs[1].shape.rank != 0:
        return None
    return dataclasses.replace(inputs[0].at(axis), divided=True)


_PRODUCTS = (
    *ENTRY_BY_ENTRY[:1],
    Rule(_scaled, LINEAR | Form.DIVIDED, Form.EQUAL),
    Rule(_scaled, Form.EQUAL, LINEAR | Form.DIVIDED),
    Rule(always(TOTAL), Form.MEAN, Form.COUNT),
    Rule(always(TOTAL), Form.COUNT, Form.MEAN),
    *ENTRY_BY_ENTRY[1:],
)
_QUOTIENTS = (
    *ENTRY_BY_ENTRY[:1],
    Rule(_scaled, LINEAR | Form.DIVIDED, Form.EQUAL),
    Rule(always(EQUAL), Form.COUNT, Form.COUNT),
    Rule(always(MEAN), Form.TOTAL, Form.COUNT),
    Rule(_divided, Form.ROWS, Form.COUNT),
    *ENTRY_BY_ENTRY[1:],
)


def _of_floats(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Keeps the kind of its input, unless it rounds."""
    before, after = operation.inputs[0].dtype, operation.outputs[0].dtype
    is_exact = after.is_floating or after.is_complex or before.is_integer
    is_exact &= not after.is_bool
    return inputs[0] if is_exact else None


def _chosen(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows what one condition chooses for all replicas."""
    _, one, other = inputs
    if one == other:
        return one
    if TOTAL in (one, other) and any(map(is_zero, operation.inputs[1:])):
        return TOTAL
    return MEAN if {one.role, other.role} == {Role.MEAN, Role.EQUAL} else None


_CHOICE = Rule(_chosen, Form.EQUAL, Form.TOTAL | Form.MEAN | Form.EQUAL, ...)


def _of_one_rank(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `Select`, which does not broadcast, and reads of other types."""
    tensors = (*operation.inputs, operation.outputs[0])
    ranks = {tensor.shape.rank for tensor in tensors}
    return entry_by_entry(operation, inputs) if len(ranks) == 1 else None


RULES: dict[str, tuple[Rule, ...]] = {
    **rules_of(
        "Abs Acos Acosh Angle ApproximateEqual AsString Asin Asinh Atan Atan2 "
        "Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 "
        "BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc "
        "BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil ClipByValue Complex "
        "ComplexAbs Conj Cos Cosh Dawsn Digamma Div Elu EluGrad Equal Erf "
        "Erfc Erfinv Exp Expint Expm1 FakeQuantWithMinMaxArgs "
        "FakeQuantWithMinMaxVars Floor FloorDiv FloorMod FresnelCos "
        "FresnelSin Greater GreaterEqual Igamma IgammaGradA Igammac Imag Inv "
        "InvGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less "
        "LessEqual Lgamma Log Log1p LogicalAnd LogicalOr Maximum Minimum Mod "
        "Ndtri NextAfter NotEqual OnesLike Polygamma Pow RandomGammaGrad Real "
        "Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6 "
        "Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad Selu "
        "SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad "
        "Softsign SoftsignGrad Spence Sqrt SqrtGrad Square SquaredDifference "
        "StringJoin Substr Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy "
        "Xlog1py Xlogy ZerosLike Zeta",
        *ENTRY_BY_ENTRY,
    ),
    # These have one input, which is never a quotient.
    **rules_of(
        "DecodeBase64 EncodeBase64 Invert LogicalNot PopulationCount "
        "StaticRegexFullMatch StaticRegexReplace StringLength StringLower "
        "StringStrip StringToHashBucket StringToHashBucketFast "
        "StringToHashBucketStrong StringToNumber StringUpper UnicodeScript "
        "UnicodeTranscode",
        ENTRY_BY_ENTRY[0],
    ),
    **rules_of(
        "CheckNumerics DebugIdentityV2 DebugIdentityV3 EnsureShape Identity "
        "PreventGradient Snapshot StopGradient",
        Rule(unchanged, ~Form(0)),
    ),
    **rules_of("Add AddN AddV2 Sub", *SUMS, *ENTRY_BY_ENTRY),
    **rules_of("Mul MulNoNan", *_PRODUCTS),
    **rules_of("DivNoNan RealDiv", *_QUOTIENTS),
    "Select": (_CHOICE, Rule(_of_one_rank, ROWS | SAME, ...)),
    "Bitcast": (Rule(_of_one_rank, ROWS),),
    "SelectV2": (_CHOICE, *ENTRY_BY_ENTRY),
    "Neg": (Rule(like(0), LINEAR | ANY_ROWS),),
    "IdentityN": (Rule(lambda _, inputs: inputs, ~Form(0), ...),),
    "Cast": (
        Rule(_of_floats, LINEAR | Form.DIVIDED | Form.PLACES),
        *ENTRY_BY_ENTRY,
    ),
}
