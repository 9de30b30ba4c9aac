"""Fused attention of rows of samples returns rows of samples."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import combined
from keras_conflux._extensions.kernels import dispatch
from keras_conflux._extensions.kernels.limits import Request
from keras_conflux._replication import steps
from keras_conflux._replication.steps import Step

_OPTIONS = (
    *("bias", "mask", "scale", "is_causal"),
    *("flash_attention", "attn_logits_soft_cap"),
)


def dot_product_attention(
    original: Callable,
    query: Any,
    key: Any,
    value: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Uses a fused kernel in the XLA program of a replica, if one can do it."""
    step = steps.current()
    if step is None or tf.executing_eagerly():
        return original(query, key, value, *args, **options)
    options.update(zip(_OPTIONS, args, strict=False))
    found = dispatch.fused(
        original,
        step,
        Request(query, key, value, **options),
        functools.partial(_note_rows, step),
    )
    if found is not None:
        return found
    return original(query, key, value, **options)


def _note_rows(
    step: Step,
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
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
