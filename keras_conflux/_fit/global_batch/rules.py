"""What an operation makes of tensors whose kinds are known.

The rules say ROWS, COUNT, TOTAL or MEAN only where they are sure. DERIVED is
always right for an operation without side effects: one device would have run
the same operation on the values of the global batch.
"""

import functools

import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._fit.global_batch import control_flow
from keras_conflux._fit.global_batch import elementwise
from keras_conflux._fit.global_batch import layouts
from keras_conflux._fit.global_batch import moves
from keras_conflux._fit.global_batch import products
from keras_conflux._fit.global_batch import ragged
from keras_conflux._fit.global_batch import reductions
from keras_conflux._fit.global_batch import shapes
from keras_conflux._fit.global_batch import slices
from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import OPAQUE
from keras_conflux._fit.global_batch.kinds import RANDOM
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import rows

_COLLECTIVES = frozenset(
    ("CollectiveReduceV2", "NcclAllReduce", "XlaAllReduce")
)
_CODE = frozenset(("PyFunc", "PyFuncStateless", "EagerPyFunc", "NumpyFunction"))


def _nothing_said(tensor: tf.Tensor) -> Kind | None:
    del tensor


def kinds_of_outputs(
    operation: tf.Operation,
    inputs: list[Kind],
    marked: control_flow.Marked = _nothing_said,
) -> list[Kind]:
    """Returns the kinds of an operation's outputs.

    Args:
        operation: Traced, of any type.
        inputs: The kinds of its inputs.
        marked: Tells what somebody has said of tensors inside of it.
    """
    kind = operation.type
    count = len(operation.outputs)
    if kind in _COLLECTIVES:
        return [EQUAL] * count
    if kind in _CODE:
        return [OPAQUE] * count
    if "Random" in kind or kind in ("Multinomial", "StatelessMultinomial"):
        return [_drawn(operation, inputs)] * count
    if kind in control_flow.CALLS:
        return control_flow.of_call(operation, inputs, kinds_of_outputs)
    if all(each == EQUAL for each in inputs):
        return [EQUAL if _keeps_equal(operation) else OPAQUE] * count
    if kind in control_flow.BRANCHES:
        nested = functools.partial(kinds_of_outputs, marked=marked)
        return control_flow.of_branches(operation, inputs, nested, marked)
    if kind in control_flow.LOOPS:
        return control_flow.of_loop(operation, inputs, kinds_of_outputs)
    rule = _RULES.get(kind)
    if rule is not None:
        result = rule(operation, inputs)
        return result if isinstance(result, list) else [result] * count
    return [of_any(operation, output, inputs) for output in operation.outputs]


def _keeps_equal(operation: tf.Operation) -> bool:
    """Whether equal inputs give equal outputs, as far as one can see."""
    if operation.type not in control_flow.BRANCHES | control_flow.LOOPS:
        return True
    names = ("then_branch", "else_branch", "body", "cond")
    attributes = operation.node_def.attr
    bodies = [
        tensorflow_graphs.function_named(
            operation.graph, attributes[name].func.name
        )
        for name in names
        if name in attributes
    ]
    return all(
        body is not None
        and not any("Random" in inner.type for inner in body.get_operations())
        for body in bodies
    )


def _drawn(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    if operation.type == "RandomShuffle":
        return RANDOM if inputs[0] == EQUAL else rows(0)
    for kind in inputs:
        if kind.role is Role.SHAPE:
            return rows(kind.axis, kind.regular)
        if kind.role is Role.ROWS:
            return kind
    if any(kind.role is Role.OPAQUE for kind in inputs):
        return OPAQUE
    if operation.type.startswith("Stateless") and set(inputs) == {EQUAL}:
        return EQUAL
    return RANDOM if set(inputs) <= {EQUAL, RANDOM} else DERIVED


_RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **reductions.RULES,
    **shapes.RULES,
    **slices.RULES,
    **layouts.RULES,
    **products.RULES,
    **moves.RULES,
    **ragged.RULES,
    **control_flow.RULES,
}
