"""The kinds of random numbers that TensorFlow draws."""

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import combined
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import aligned
from keras_conflux._batch_analysis.rule import always
from keras_conflux._batch_analysis.rule import rules_of


def _are_own(operation: tf.Operation, inputs: list[Kind]) -> bool:
    """Whether each replica draws numbers of its own."""
    return operation.op_def.is_stateful or RANDOM in inputs


def _drawn(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows numbers of a shape, or one for each of a tensor's entries."""
    output = operation.outputs[0]
    found = [
        Kind(Role.ROWS, kind.axis, kind.entries)
        for kind in inputs
        if kind.role is Role.SHAPE
    ]
    for tensor, kind in zip(operation.inputs, inputs, strict=True):
        if kind.role is Role.ROWS:
            axis = aligned(tensor, kind, output)
            if axis is None:
                return None
            found.append(kind.at(axis))
    if not found:
        return RANDOM if _are_own(operation, inputs) else None
    axes = {kind.axis for kind in found}
    if len(axes) > 1:
        return None
    axis = axes.pop()
    if _are_own(operation, inputs):
        return combined(found, axis)
    return mixed_rows(found, axis)


def _categories(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows draws by the probabilities of each sample."""
    if inputs[0].axis != 0:
        return None
    if _are_own(operation, inputs):
        return inputs[0]
    return mixed_rows(inputs[:1], 0)


RULES: dict[str, tuple[Rule, ...]] = {
    **rules_of(
        "ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 "
        "RandomUniformInt StatefulRandomBinomial "
        "StatelessParameterizedTruncatedNormal StatelessRandomBinomial "
        "StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal "
        "StatelessRandomNormalV2 StatelessRandomPoisson "
        "StatelessRandomUniform StatelessRandomUniformFullInt "
        "StatelessRandomUniformFullIntV2 StatelessRandomUniformInt "
        "StatelessRandomUniformIntV2 StatelessRandomUniformV2 "
        "StatelessTruncatedNormal StatelessTruncatedNormalV2",
        Rule(_drawn, Form.SHAPE | SAME, SAME | Form.ROWS, ...),
    ),
    **rules_of(
        "RandomStandardNormal RandomUniform TruncatedNormal",
        Rule(_drawn, Form.SHAPE | SAME),
    ),
    "Multinomial": (
        Rule(_categories, Form.ROWS, SAME),
        Rule(always(RANDOM), SAME, SAME),
    ),
    "StatelessMultinomial": (Rule(_categories, Form.ROWS, SAME, SAME),),
    "RandomShuffle": (Rule(always(RANDOM), SAME),),
    "RngReadAndSkip": (Rule(always(RANDOM), SAME, ...),),
}
DRAWING = frozenset(RULES)
"""The types of operations that draw random numbers."""
