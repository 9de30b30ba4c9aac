"""Masks as numbers that are added to scores, and rows that they hide wholly.

Where no key is allowed to a query, Keras' scores are all the same, so that its
output is the mean of the values, and its query and the keys get no gradients
from it. In bfloat16 a fused kernel computes the mean, too, as no score counts
next to the summand; in float16 the mean is put in place. The kernel's gradients
of such a row are zeros where its statistic is huge. The gradients of the values
through the mean are added to theirs.
"""

import dataclasses
import functools
from typing import Any

import tensorflow as tf

_LOW = {tf.bfloat16: -(2.0**41), tf.float16: -(2.0**15)}
"""The summand of scores that are not allowed. cuDNN's kernels subtract two of
these, so it is not the lowest number; a power of two makes that exact."""
_NO_SCORE_COUNTS = -(2.0**40)
"""Next to this, or less, float32 keeps nothing of scores up to 2^15."""
_HUGE = 2.0**41
"""A statistic next to which each weight of a row is zero."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """A boolean mask, `(B or 1, N or 1, T, S)`. True entries are allowed."""

    allowed: tf.Tensor

    @classmethod
    def broadcast(
        cls, mask: tf.Tensor, is_causal: bool, length: int, keys: int
    ) -> "Mask":
        """Returns a mask that may be given in fewer axes, of known sizes.

        With `is_causal`, query `t` is allowed the keys 0 to `t` only.
        """
        shape = mask.shape.as_list()
        mask = tf.reshape(mask, [1] * (4 - len(shape)) + shape)
        triangle = tf.ones([length, keys], tf.bool)
        if is_causal:
            triangle = tf.linalg.band_part(triangle, -1, 0)
        return cls(tf.logical_and(mask, triangle))

    @functools.cached_property
    def hidden(self) -> tf.Tensor:
        """The queries without a key, `(B or 1, N or 1, T)`."""
        return tf.logical_not(tf.reduce_any(self.allowed, axis=-1))

    @property
    def _hidden_rows(self) -> tf.Tensor:
        """The same in the shape `(B or 1, T, N or 1, 1)`."""
        return tf.expand_dims(tf.transpose(self.hidden, [0, 2, 1]), -1)

    def bias(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the summand of the scores."""
        low = tf.constant(_LOW[dtype], dtype)
        return tf.where(self.allowed, tf.zeros([], dtype), low)

    def with_means(self, output: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Returns an output whose hidden rows are means of the values."""
        if _LOW[output.dtype] <= _NO_SCORE_COUNTS:
            return output
        means = tf.reduce_mean(tf.cast(values, tf.float32), 1, keepdims=True)
        heads: Any = output.shape[2]
        means = tf.cast(means, output.dtype)
        means = tf.repeat(means, heads // values.shape[2], axis=2)
        return tf.where(self._hidden_rows, means, output)

    def without_hidden(self, statistics: tf.Tensor) -> tf.Tensor:
        """Returns statistics, `(B, N, T)`, by which hidden rows weigh zero."""
        return tf.where(self.hidden, _HUGE, statistics)

    def slope_of_means(self, slope: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Returns the values' gradients through the means of hidden rows."""
        shape: Any = values.shape
        batch, keys, heads, size = shape
        theirs = tf.where(self._hidden_rows, tf.cast(slope, tf.float32), 0.0)
        summed = tf.reduce_sum(theirs, axis=1, keepdims=True) / keys
        summed = tf.reshape(summed, [batch, 1, heads, -1, size])
        return tf.cast(tf.reduce_sum(summed, axis=3), values.dtype)
