"""Operations of a step that XLA compiles to slow programs, replaced by others.

A gradient is asked for by a tensor that the program has, and follows traced
operations. So operations are replaced when the whole step has been traced.
"""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from keras_conflux._extensions.kernels import cross_entropies
from keras_conflux._extensions.kernels import largest_of_windows
from keras_conflux._extensions.kernels import residual_sums
from keras_conflux._extensions.kernels import sums_over_samples
from keras_conflux._extensions.kernels.compiled_shapes import ShapeOf
from keras_conflux._extensions.kernels.compiled_shapes import compiled_shapes
from keras_conflux._graphs import rewriting
from keras_conflux._replication.steps import Step

_REPLACEMENTS: dict[
    str, Callable[[tf.Operation, ShapeOf], Sequence[tf.Tensor] | None]
] = {
    "AddN": residual_sums.replacement,
    "AddV2": residual_sums.replacement,
    "MaxPoolGrad": largest_of_windows.replacement,
    "SparseSoftmaxCrossEntropyWithLogits": cross_entropies.replacement,
    "Sum": sums_over_samples.replacement,
}
"""By the type of an operation, a function of other outputs, or `None`."""


def replace(step: Step) -> None:
    """Replaces operations of the graph of a step that XLA will compile."""
    shape_of = compiled_shapes(step)
    for operation in step.graph.get_operations():
        if operation.type in _REPLACEMENTS:
            _replace(operation, shape_of)


def _replace(operation: tf.Operation, shape_of: ShapeOf) -> None:
    # Before the replacement reads them.
    readers = [found.consumers() for found in operation.outputs]
    if not any(readers):
        return
    others = _REPLACEMENTS[operation.type](operation, shape_of)
    if others is None:
        return
    for found, reading, other in zip(
        operation.outputs, readers, others, strict=True
    ):
        rewriting.redirect(found, other, reading)
