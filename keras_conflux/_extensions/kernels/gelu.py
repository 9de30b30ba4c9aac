"""Exact GELU of numbers of 16 bits, by an error function that is fast in XLA.

TensorFlow computes GELU with the complementary error function, which XLA spells
out in so many instructions that it takes longer than the memory does. It also
writes its values to memory for the gradient. The error function is one call of
CUDA's library. It is fast enough to be computed once more for the gradient,
which needs nothing but GELU's input then.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._extensions.kernels.limits import HALVES
from keras_conflux._replication import steps


def gelu(original: Callable, x: Any, approximate: bool = True) -> Any:
    """Computes GELU within an XLA program, in float32."""
    is_half = isinstance(x, tf.Tensor) and x.dtype in HALVES
    if approximate or not steps.in_xla() or not is_half:
        return original(x, approximate=approximate)
    return _exact(x)


@tf.custom_gradient
def _exact(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        at = tf.cast(x, tf.float32)
        density = tf.exp(-0.5 * tf.square(at)) / math.sqrt(2 * math.pi)
        slope = 0.5 * _twice_below(at) + at * density
        return tf.cast(slope * tf.cast(upstream, tf.float32), x.dtype)

    exact = tf.cast(x, tf.float32)
    return tf.cast(0.5 * exact * _twice_below(exact), x.dtype), gradient


def _twice_below(x: tf.Tensor) -> tf.Tensor:
    """Returns twice the part of a normal distribution below each number."""
    return 1.0 + tf.math.erf(x * math.sqrt(0.5))
