"""The dtypes that collectives take, and what they do to a leaf."""

from typing import Any

import keras
import tensorflow as tf

REDUCIBLE = (
    tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64,
)  # fmt: skip
"""The dtypes that can be reduced."""
# What can only be copied travels in a wider dtype that can be added.
_SUMMABLE = {
    **dict.fromkeys(
        (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
    ),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),  # which wraps around
}
COPYABLE = (*REDUCIBLE, *_SUMMABLE)
"""The dtypes that can be broadcast and gathered."""


def as_tensor(verb: str, path: str, leaf: Any, dtypes: Any) -> Any:
    """Returns a leaf as a tensor or `tf.IndexedSlices`.

    Args:
        verb: What is to be done, for the error.
        path: Where the leaf is in its tree, for the error.
        leaf: A tensor, variable, array or number.
        dtypes: Those that will do.

    Raises:
        TypeError: If it is not numeric, or of another dtype.
    """
    if isinstance(leaf, keras.Variable):
        leaf = leaf.value
    if not isinstance(leaf, tf.IndexedSlices):
        try:
            leaf = tf.convert_to_tensor(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{verb}: the leaf at {path} is a {type(leaf).__name__}, not "
                "something numeric. Leave it out of the tree, or put None."
            ) from error
    if leaf.dtype not in dtypes:
        names = ", ".join(dtype.name for dtype in dtypes)
        raise TypeError(
            f"{verb}: the leaf at {path} is {leaf.dtype.name}; this op takes "
            f"{names}. Cast it first."
        )
    return leaf


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is some rows of a tensor."""
    return isinstance(leaf, tf.IndexedSlices)


def weighted(leaf: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """Returns a leaf times a scalar: zeros for weight 0, also for NaN."""
    if weight is None:
        return leaf
    if not leaf.dtype.is_floating:
        leaf = tf.cast(leaf, keras.config.floatx())
    masked = tf.where(weight > 0, leaf, tf.zeros_like(leaf))
    return masked * tf.cast(weight, leaf.dtype)


def divided(leaf: tf.Tensor, count: int, op: str) -> tf.Tensor:
    """Divides a sum by `count`; the mean of integers is a float."""
    if op == "mean" and not leaf.dtype.is_floating:
        exact = tf.cast(leaf, tf.float64) / count
        return tf.cast(exact, keras.config.floatx())
    return leaf / tf.cast(count, leaf.dtype) if count > 1 else leaf


def as_summable(leaf: tf.Tensor) -> tf.Tensor:
    """Returns a leaf in a dtype that can be added."""
    return tf.cast(leaf, _SUMMABLE.get(leaf.dtype, leaf.dtype))


def sum_identity(leaf: tf.Tensor) -> tf.Tensor:
    """Returns the scalar that changes nothing if added to such a leaf."""
    # -0.0 is what leaves every float as it is when added, -0.0 included.
    return tf.constant(-0.0 if leaf.dtype.is_floating else 0, leaf.dtype)


def sum_identity_like(leaf: tf.Tensor) -> tf.Tensor:
    """Returns what changes nothing of a leaf of this shape if added."""
    return tf.fill(tf.shape(leaf), sum_identity(leaf))
