"""The dtypes that collectives take, and the conversions of a leaf."""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._communication.transports.ops import Extreme

REDUCIBLE = (
    tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64,
)  # fmt: skip
"""The dtypes that can be reduced."""
# A dtype that can only be copied travels in a wider dtype that can be added.
_SUMMABLE = {
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8), tf.int32),
    **dict.fromkeys((tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),  # which wraps around
}
COPYABLE = (*REDUCIBLE, *_SUMMABLE)
"""The dtypes that can be broadcast and gathered."""


def as_tensor(verb: str, path: str, leaf: Any, dtypes: Any) -> Any:
    """Returns a numeric leaf as a tensor or `tf.IndexedSlices`."""
    if isinstance(leaf, keras.Variable):
        leaf = leaf.value
    if not isinstance(leaf, tf.IndexedSlices):
        try:
            leaf = tf.convert_to_tensor(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{verb}: {path} is a {type(leaf).__name__}, not "
                "something numeric. Leave it out of the tree, or put None."
            ) from error
    if leaf.dtype not in dtypes:
        names = ", ".join(dtype.name for dtype in dtypes)
        raise TypeError(
            f"{verb}: {path} is {leaf.dtype.name}; this op takes "
            f"{names}. Cast it first."
        )
    return leaf


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is some rows of a tensor."""
    return isinstance(leaf, tf.IndexedSlices)


def weighted(leaf: Any, weight: tf.Tensor | None) -> Any:
    """Returns a leaf times a scalar, or zeros for 0 or `False`, also of NaN."""
    if leaf is None or weight is None:
        return leaf
    if is_sparse(leaf):
        values = weighted(leaf.values, weight)
        return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)
    if not leaf.dtype.is_floating:
        leaf = tf.cast(leaf, keras.config.floatx())
    masked = tf.where(tf.cast(weight, tf.float64) > 0, leaf, 0)
    return masked * tf.cast(weight, leaf.dtype)


def as_summable(leaf: tf.Tensor) -> tf.Tensor:
    """Returns a leaf in a dtype that can be added."""
    return tf.cast(leaf, _SUMMABLE.get(leaf.dtype, leaf.dtype))


# NCCL takes `fminf` and `fmaxf`, which drop NaN: the result would be another
# replica's number, where one device says NaN. Among integers it is beyond all.
_INTEGERS = {tf.float32: tf.int32, tf.float64: tf.int64}
_FLOATS = {integer: floats for floats, integer in _INTEGERS.items()}


def to_ordered_integers(x: tf.Tensor, op: Extreme) -> tf.Tensor:
    """Returns integers in the order of `x`, with NaN where `op` finds it."""
    if x.dtype not in _INTEGERS:  # of 16 bits, which no collective counts in
        x = tf.cast(x, tf.float32)
    integer = _INTEGERS[x.dtype]
    bits = tf.constant(op.nan_bits(integer), integer)
    x = tf.where(tf.math.is_nan(x), tf.bitcast(bits, x.dtype), x)
    return _flip_negatives(tf.bitcast(x, integer))


def to_floats(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the floats of which `to_ordered_integers` made `x`."""
    return tf.cast(tf.bitcast(_flip_negatives(x), _FLOATS[x.dtype]), dtype)


def _flip_negatives(bits: tf.Tensor) -> tf.Tensor:
    """Turns the order of the negative ones round; its own inverse."""
    places = tf.constant(8 * bits.dtype.size - 1, bits.dtype)
    if_negative = tf.bitwise.right_shift(bits, places)  # all bits, else none
    largest = tf.constant(bits.dtype.max, bits.dtype)
    flipped = tf.bitwise.bitwise_and(if_negative, largest)
    return tf.bitwise.bitwise_xor(bits, flipped)
