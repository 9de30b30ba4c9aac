"""Decides which attentions of a replica a fused kernel computes.

Fused attention of rows of samples returns rows of samples.
"""

import functools
import logging
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import combined
from keras_conflux._extensions.kernels import cudnn
from keras_conflux._extensions.kernels import masks
from keras_conflux._extensions.kernels.compiled_shapes import CompiledShapes
from keras_conflux._extensions.kernels.fused import Fused
from keras_conflux._extensions.kernels.limits import Request
from keras_conflux._replication import steps

_log = logging.getLogger("keras_conflux")


def dot_product_attention(
    original: Callable, query: Any, key: Any, value: Any, *args: Any, **kw: Any
) -> Any:
    """Uses a fused kernel in the XLA program of a replica, if one can do it."""
    step = steps.current()
    found = None
    if step is not None and not tf.executing_eagerly():
        found = _fused(original, step, Request(query, key, value, *args, **kw))
    return original(query, key, value, *args, **kw) if found is None else found


def _fused(
    composed: Callable[..., Any], step: steps.Step, request: Request
) -> tf.Tensor | None:
    """Returns fused attention, or `None` where Keras' own is to be used."""
    shape_of = CompiledShapes.of(step).shape_of
    obstacle = cudnn.obstacle(step) or request.obstacle(shape_of)
    if obstacle is not None:
        _say(f"{step.name}: attention is not fused, because {obstacle}.")
        return None
    inputs = request.query, request.key, request.value
    shapes: list[Any] = [*map(shape_of, inputs)]
    _say(f"{step.name}: attention is fused for queries {shapes[0]}.")
    (_, length, _, size), (_, keys, *_) = shapes[:2]
    mask = None
    if request.mask is not None:
        given = tf.ensure_shape(request.mask, shape_of(request.mask))
        mask = masks.Mask.broadcast(given, request.is_causal, length, keys)
    is_causal = request.is_causal and mask is None
    scale = 1 / math.sqrt(size) if request.scale is None else request.scale
    keras_own = functools.partial(
        composed,
        mask=request.mask,
        scale=request.scale,
        is_causal=request.is_causal,
    )
    form = cudnn.Form(float(scale), is_causal)
    note = functools.partial(_note_rows, step)
    return Fused(form, shapes, mask, keras_own, note)(*inputs)


def _note_rows(
    step: steps.Step, outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]
) -> None:
    """Marks the kinds of outputs, which the graph shows as of some module."""
    if step.kinds is None:
        return
    kinds = [step.kinds.of(each) for each in inputs]
    of_rows = [kind for kind in kinds if kind.role is Role.ROWS]
    others = {kind for kind in kinds if kind.role is not Role.ROWS}
    if of_rows and others <= {EQUAL} and {x.axis for x in of_rows} == {0}:
        for output in outputs:
            step.kinds.mark(output, combined(of_rows, 0))


@functools.cache
def _say(message: str) -> None:
    """Logs a message the first time."""
    _log.debug(message)
