"""Whether a value of which not much is known may be a sum over samples."""

import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._replication.step_context import StepContext

_QUOTIENTS = ("RealDiv", "DivNoNan")
_NO_COUNTS = (Role.TOTAL, Role.MEAN, Role.DERIVED)
"""What is known to make of a sum no mean over samples, if it is divided by it.
"""


def may_be_sum(target: tf.Tensor, context: StepContext) -> bool:
    """Whether a scalar comes from a sum of what is not known, and no mean."""
    if target.shape.rank != 0:
        return False
    waiting, seen = [target], set()
    while waiting:
        tensor = waiting.pop()
        kind = context.kinds.of(tensor)
        if id(tensor) in seen or kind.role is not Role.OPAQUE:
            continue
        seen.add(id(tensor))
        if tensor.op.type == "Sum":
            return True
        if tensor.op.type in _QUOTIENTS:
            below = context.kinds.of(tensor.op.inputs[1]).role
            if below in _NO_COUNTS:
                return True
            if below is Role.EQUAL:
                waiting.append(tensor.op.inputs[0])
        elif tensor.op.type != "Mean":
            waiting.extend(tensor.op.inputs)
            waiting.extend(tensorflow_graphs.results_inside(tensor))
    return False
