"""Decides which attentions of a replica a fused kernel computes."""

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_tracing
from keras_conflux._extensions.kernels import masks
from keras_conflux._extensions.kernels.compiled_shapes import compiled_shapes
from keras_conflux._extensions.kernels.cudnn import Cudnn
from keras_conflux._extensions.kernels.fused import Fused
from keras_conflux._extensions.kernels.kernel import Form
from keras_conflux._extensions.kernels.kernel import Kernel
from keras_conflux._extensions.kernels.limits import Request
from keras_conflux._replication.steps import Step

_log = logging.getLogger("keras_conflux")
_said: set[str] = set()

kernel: Kernel = Cudnn()
"""The kernel of fused attention."""


def fused(
    composed: Callable[..., Any],
    step: Step,
    request: Request,
    note: Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], None],
) -> tf.Tensor | None:
    """Returns fused attention, or `None` where Keras' own is to be used.

    Args:
        composed: Keras' own, which takes the fields of a `Request`.
        step: The step that a replica is tracing.
        request: The attention that is asked for.
        note: Called with the outputs, and their inputs.
    """
    shape_of = compiled_shapes(step)
    obstacle = kernel.obstacle(step) or request.obstacle(shape_of)
    if obstacle is not None:
        _say(f"{step.name}: attention is not fused, because {obstacle}.")
        return None
    inputs = request.query, request.key, request.value
    shapes = [*map(shape_of, inputs)]
    _say(f"{step.name}: attention is fused for queries {shapes[0]}.")
    mask = None
    if request.mask is not None:
        given = tf.ensure_shape(request.mask, shape_of(request.mask))
        lengths = shapes[0][1], shapes[1][1]
        mask = masks.Mask.broadcast(given, request.is_causal, *lengths)
    is_causal = request.is_causal and mask is None
    scale = request.scale
    if scale is None:
        scale = 1 / math.sqrt(shapes[0][3])

    def keras_own(query: Any, key: Any, value: Any) -> Any:
        return composed(
            query,
            key,
            value,
            mask=request.mask,
            scale=request.scale,
            is_causal=request.is_causal,
        )

    attention = Fused(
        kernel,
        Form(float(scale), is_causal),
        shapes,
        mask,
        keras_own,
        tensorflow_tracing.is_recorded(inputs),
        note,
    )
    return attention(*inputs)


def _say(message: str) -> None:
    """Logs a message the first time."""
    if message not in _said:
        _said.add(message)
        _log.debug(message)
