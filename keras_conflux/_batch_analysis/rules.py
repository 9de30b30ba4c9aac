"""The kinds of operations' outputs, by the kinds of their inputs."""

import functools

import tensorflow as tf

from keras_conflux._batch_analysis import control_flow
from keras_conflux._batch_analysis import drawn
from keras_conflux._batch_analysis import elementwise
from keras_conflux._batch_analysis import layouts
from keras_conflux._batch_analysis import per_sample
from keras_conflux._batch_analysis import products
from keras_conflux._batch_analysis import reductions
from keras_conflux._batch_analysis import rule
from keras_conflux._batch_analysis import shapes
from keras_conflux._batch_analysis import slices
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._graphs import bodies
from keras_conflux._graphs.effects import HARMLESS
from keras_conflux._graphs.effects import Effect
from keras_conflux._graphs.effects import effect_of
from keras_conflux._graphs.effects import is_collective

CODE = frozenset(("PyFunc", "PyFuncStateless", "EagerPyFunc", "NumpyFunction"))
_IN_ORDER = {layouts.expanded, layouts.reshape, layouts.squeeze}
_IN_ORDER |= {elementwise.unchanged}
"""Claims of operations that keep their first input's entries in order."""


def kinds_of_outputs(
    operation: tf.Operation,
    inputs: list[Kind],
    marked: control_flow.Marked = lambda tensor: None,
    inside: control_flow.KindsOf | None = None,
) -> list[Kind]:
    """Returns the kinds of an operation's outputs.

    `marked` tells the kinds that were set for tensors inside of it. `inside` is
    called instead of this for the operations that it runs.
    """
    kind = operation.type
    count = len(operation.outputs)
    if is_collective(operation):  # a part counts as the whole
        return [EQUAL] * count
    if kind in CODE:
        return [OPAQUE] * count
    one, other = operation.inputs if kind == "Equal" else (operation, None)
    if one is other and one.dtype == tf.bool and one.shape.rank == 0:
        return [EQUAL]  # which orders `tf.recompute_grad`
    nested = inside or kinds_of_outputs
    if kind in bodies.CALLS:
        return control_flow.of_call(operation, inputs, nested)
    if all(each == EQUAL for each in inputs) and _keeps_equal(operation):
        return [EQUAL] * count
    if kind in bodies.BRANCHES:
        nested = inside or functools.partial(nested, marked=marked)
        return control_flow.of_branches(operation, inputs, nested, marked)
    if kind in bodies.LOOPS:
        return control_flow.of_loop(operation, inputs, nested)
    return rule.apply(RULES.get(kind, ()), operation, inputs)


def _keeps_equal(operation: tf.Operation) -> bool:
    """Whether equal inputs surely give equal outputs."""
    is_nested = operation.type in bodies.BRANCHES | bodies.LOOPS
    refused = Effect.DRAWS | Effect.OTHER if is_nested else ~HARMLESS
    return not effect_of(operation) & refused


RULES: dict[str, tuple[rule.Rule, ...]] = {
    **(elementwise.RULES | reductions.RULES | shapes.RULES | slices.RULES),
    **(layouts.RULES | products.RULES | per_sample.RULES | drawn.RULES),
    **control_flow.RULES,
}
"""The rules for the outputs of operations, by type."""


def sources_of_entries(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs whose entries become an output's, in order.

    Each entry is made of the ones in its place. Unknown operations have none.
    """
    claims = {each.claim for each in RULES.get(operation.type, ())}
    if elementwise.entry_by_entry in claims:
        return list(operation.inputs)
    return [] if claims.isdisjoint(_IN_ORDER) else [operation.inputs[0]]
