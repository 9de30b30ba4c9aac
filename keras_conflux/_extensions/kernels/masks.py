"""Masks as numbers that are added to scores, and rows that they hide wholly.

Where no key is allowed to a query, Keras' scores are all the same, so that its
output is the mean of the values. A fused kernel has no such case: the mask of
such a row is left out there, and its output and gradients are put in place.
"""

import dataclasses
import functools
from typing import Any

import tensorflow as tf

_LOW = {tf.bfloat16: -(2.0**41), tf.float16: -(2.0**15)}
"""What is added to scores that are not allowed. cuDNN's kernels subtract two of
these, so it is not the lowest number; a power of two makes that exact."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """A boolean mask, `(B or 1, N or 1, T, S)`. True entries are allowed."""

    allowed: tf.Tensor

    @classmethod
    def of(
        cls, mask: tf.Tensor, is_causal: bool, length: int, keys: int
    ) -> "Mask":
        """Returns a mask that may be given in fewer axes, as broadcasting has.

        Args:
            mask: Of known shape.
            is_causal: Whether query `t` is allowed the keys 0 to `t` only.
            length: The number of queries.
            keys: The number of keys.
        """
        shape = _sizes(mask)
        mask = tf.reshape(mask, [1] * (4 - len(shape)) + shape)
        triangle = tf.ones([length, keys], tf.bool)
        if is_causal:
            triangle = tf.linalg.band_part(triangle, -1, 0)
        return cls(tf.logical_and(mask, triangle))

    @functools.cached_property
    def hidden(self) -> tf.Tensor:
        """The queries without a key, `(B or 1, T, N or 1, 1)`."""
        found = tf.logical_not(tf.reduce_any(self.allowed, axis=-1))
        return tf.expand_dims(tf.transpose(found, [0, 2, 1]), -1)

    def bias(self, dtype: tf.DType) -> tf.Tensor:
        """Returns what is added to the scores; hidden rows get nothing."""
        hidden = tf.transpose(self.hidden, [0, 2, 1, 3])
        allowed = tf.logical_or(self.allowed, hidden)
        low = tf.constant(_LOW[dtype], dtype)
        return tf.where(allowed, tf.zeros([], dtype), low)

    def with_means(self, output: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Returns an output whose hidden rows are means of the values."""
        means = tf.reduce_mean(tf.cast(values, tf.float32), 1, keepdims=True)
        (_, _, heads, _), (_, _, key_heads, _) = _sizes(output), _sizes(values)
        means = tf.repeat(
            tf.cast(means, output.dtype), heads // key_heads, axis=2
        )
        return tf.where(self.hidden, means, output)

    def shown(self, upstream: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of the rows that have keys; others get zeros."""
        return tf.where(self.hidden, tf.zeros([], upstream.dtype), upstream)

    def gradient_of_means(
        self, upstream: tf.Tensor, values: tf.Tensor
    ) -> tf.Tensor:
        """Returns what the values get through the means of hidden rows."""
        batch, keys, heads, size = _sizes(values)
        theirs = tf.where(self.hidden, tf.cast(upstream, tf.float32), 0.0)
        summed = tf.reduce_sum(theirs, axis=1, keepdims=True) / keys
        summed = tf.reshape(summed, [batch, 1, heads, -1, size])
        return tf.cast(tf.reduce_sum(summed, axis=3), values.dtype)


def _sizes(tensor: Any) -> list[int]:
    """Returns the sizes of a tensor of known shape."""
    return tensor.shape.as_list()
