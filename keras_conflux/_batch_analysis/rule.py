"""Rules of kinds, and the default where no rule accepts the kinds."""

import dataclasses
import math
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import mixed_rows

SAME = Form.EQUAL | Form.RANDOM
"""The forms of values that a replica has as one device has, or has drawn."""
LINEAR = Form.TOTAL | Form.COUNTED | Form.MEAN | Form.COUNT
"""The forms that add up over replicas, with weights independent of values."""
STATISTIC = LINEAR | Form.DERIVED
"""The forms that may depend on all samples, without entries of samples."""
ROWS = Form.ROWS | Form.JOINED
"""The forms of rows that are one device's."""
ANY_ROWS = ROWS | Form.DIVIDED
"""The forms of rows."""

Claim = Callable[[tf.Operation, list[Kind]], Any]
"""Returns the kind of all outputs, a list of them, or `None` if it is not sure.

Rows that are mixed are given to it as if they were not.
"""


class Rule:
    """A rule says of outputs more than that they are DERIVED.

    Args:
        claim: See `Claim`.
        accepts: The forms of each input, and before `...` of any number.
    """

    def __init__(self, claim: Claim, *accepts: Form | EllipsisType) -> None:
        self.claim = claim
        self.accepts = accepts

    def does_accept(self, forms: list[Form]) -> bool:
        """Whether it says something of inputs of these forms."""
        accepted = self.expanded(len(forms))
        return accepted is not None and all(
            form & taken for form, taken in zip(forms, accepted, strict=True)
        )

    def expanded(self, count: int) -> list[Form] | None:
        """Returns the forms of each of `count` inputs, if it takes so many."""
        forms = [form for form in self.accepts if isinstance(form, Form)]
        if ... not in self.accepts:
            return forms if len(forms) == count else None
        repeated = self.accepts.index(...) - 1
        times = count - len(forms) + 1
        if times < 1:
            return None
        before, after = forms[:repeated], forms[repeated + 1 :]
        return [*before, *[forms[repeated]] * times, *after]


def rules_of(types: str, *rules: Rule) -> dict[str, tuple[Rule, ...]]:
    """Returns rows of the table: types of operations that have one's rules."""
    return dict.fromkeys(types.split(), rules)


def always(kind: Kind) -> Claim:
    """Makes a claim that holds for all inputs that a rule accepts."""
    return lambda operation, inputs: kind


def like(position: int) -> Claim:
    """Makes the claim that outputs are of the kind of an input."""
    return lambda operation, inputs: inputs[position]


def shape_alone(claim: Claim) -> Claim:
    """Makes a claim of shapes alone: values depend on other samples."""

    def of_shape(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
        found = claim(operation, inputs)
        if found is None or found.role is not Role.ROWS:
            return None
        return mixed_rows([found], found.axis)

    return of_shape


def beside_statistics(claim: Claim) -> Claim:
    """Makes a claim of shapes alone, of rows that meet the batch's values."""

    def of_shape(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
        is_static = all(
            tensor.shape.is_fully_defined() or kind.role is Role.ROWS
            for tensor, kind in zip(operation.inputs, inputs, strict=True)
        )
        return shape_alone(claim)(operation, inputs) if is_static else None

    return of_shape


def apply(
    rules: tuple[Rule, ...], operation: tf.Operation, inputs: list[Kind]
) -> list[Kind]:
    """Returns the kinds of outputs by the first rule that is sure of them."""
    if rules:
        forms = [kind.form for kind in inputs]
        is_mixed = any(kind.mixed for kind in inputs)
        given = inputs
        if is_mixed:
            given = [dataclasses.replace(kind, mixed=False) for kind in inputs]
        for rule in rules:
            is_of_these = rule.does_accept(forms)
            found = rule.claim(operation, given) if is_of_these else None
            if found is None:
                continue
            if not isinstance(found, list):
                found = [found] * len(operation.outputs)
            return [_mixed(kind) for kind in found] if is_mixed else found
    return [default(operation, inputs)] * len(operation.outputs)


def default(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Has an operation run once more, on one device's values."""
    roles = {kind.role for kind in inputs}
    if Role.OPAQUE in roles or operation.op_def.is_stateful:
        return OPAQUE
    return RANDOM if roles <= {Role.EQUAL, Role.RANDOM} else DERIVED


def _mixed(kind: Kind) -> Kind:
    """Returns the kind in a rule's claim, for rows that are mixed."""
    if kind.role is Role.ROWS:
        return mixed_rows([kind], kind.axis)
    return DERIVED if kind.role in (Role.TOTAL, Role.MEAN) else kind


def aligned(tensor: tf.Tensor, kind: Kind, output: tf.Tensor) -> int | None:
    """Returns the axis of samples after broadcasting, if ranks are known."""
    if tensor.shape.rank is None or output.shape.rank is None:
        return None
    return kind.axis + output.shape.rank - tensor.shape.rank


def has_one_entry(tensor: tf.Tensor, output: tf.Tensor, axis: int) -> bool:
    """Whether a tensor has one entry for all along an axis of an output."""
    if tensor.shape.rank is None:
        return False
    own = axis - output.shape.rank + tensor.shape.rank
    return own < 0 or tensor.shape[own] == 1


def of_a_sample(tensor: tf.Tensor) -> int:
    """Returns how many entries a tensor of known rank has for each sample."""
    return math.prod(n for n in tensor.shape.as_list() if n is not None)


def rows_among(inputs: list[Kind]) -> list[Kind]:
    """Returns the kinds of rows among kinds."""
    return [kind for kind in inputs if kind.role is Role.ROWS]


_FROM_ONE = {"BroadcastTo": 0, "Fill": 1, "Identity": 0, "Reshape": 0}
"""Which input has the value of all entries, if it is one."""


def is_zero(tensor: tf.Tensor) -> bool:
    """Whether all entries of a tensor are known to be zero."""
    while tensor.op.type in _FROM_ONE:
        tensor = tensor.op.inputs[_FROM_ONE[tensor.op.type]]
    if tensor.op.type == "ZerosLike":
        return True
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)


def _broadcast(_: tf.Operation, *given: Any) -> Any:
    """Broadcasts shapes, if no number of samples meets another size than 1."""
    length = max(map(len, given))
    sizes = [[1] * (length - len(each)) + [*each] for each in given]
    pairs = [*zip(*sizes, strict=True)]
    if any(1 not in each and Role.COUNT in each for each in pairs):
        raise ValueError
    return np.array([b if a == 1 else a for a, b in pairs], object)


def _strided(operation: tf.Operation, sizes: Any, *ends: Any) -> Any:
    attribute = operation.get_attr
    if attribute("new_axis_mask") or attribute("ellipsis_mask"):
        raise ValueError
    begin, end, step = (int(each[0]) for each in ends)
    if attribute("shrink_axis_mask") & 1:
        return sizes[begin]
    first = None if attribute("begin_mask") & 1 else begin
    last = None if attribute("end_mask") & 1 else end
    return sizes[first:last:step]


def _stitched(operation: Any, *given: Any) -> Any:
    """Replaces some sizes, as by ones."""
    found = np.full(operation.outputs[0].shape, None)
    half = len(given) // 2
    for places, sizes in zip(given[:half], given[half:], strict=True):
        found[places.astype(int)] = sizes
    return found


def _sliced(_: tf.Operation, value: Any, begin: Any, size: Any) -> Any:
    limits = zip(begin.astype(int), size.astype(int), strict=True)
    return value[tuple(slice(b, None if n < 0 else b + n) for b, n in limits)]


MOVES: dict[str, Callable[..., Any]] = {
    "BroadcastArgs": _broadcast,
    "ConcatV2": lambda _, *parts: np.concatenate(parts[:-1], parts[-1]),
    "DynamicStitch": _stitched,
    "GatherV2": lambda _, sizes, places, __: sizes[places.astype(int)],
    "Pack": lambda made, *parts: np.stack(parts, made.get_attr("axis")),
    "ParallelDynamicStitch": _stitched,
    "Slice": _sliced,
    "Split": lambda made, _, sizes: np.split(sizes, len(made.outputs)),
    "SplitV": lambda made, sizes, *_: np.split(
        sizes, np.cumsum([x.shape[0] for x in made.outputs])[:-1]
    ),
    "StridedSlice": _strided,
    "Unpack": lambda _, sizes: [*sizes],
}
"""Does to arrays what operations do that move their entries."""


_ARITHMETIC = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorMod": np.mod,
    "InvertPermutation": np.argsort,
    "Range": np.arange,
    "Reshape": np.reshape,
}


def static_value(tensor: tf.Tensor) -> Any:
    """Returns a tensor's value, also if it is computed from known ones."""
    value = tf.get_static_value(tensor)
    operation = tensor.op
    moves = operation.type in ("ConcatV2", "Pack", "Slice")
    if value is not None or not (moves or operation.type in _ARITHMETIC):
        return value
    parts = [static_value(part) for part in operation.inputs]
    if any(part is None for part in parts):
        return None
    if moves:
        return MOVES[operation.type](operation, *parts)
    return _ARITHMETIC[operation.type](*parts)
