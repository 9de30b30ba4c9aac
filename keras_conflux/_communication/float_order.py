"""Floats as integers of the same order, for minima and maxima between GPUs.

NCCL takes `fminf` and `fmaxf`, which drop NaN: where one replica has NaN, the
result would be another's number. One device says NaN. Among integers NaN has a
place, beyond all numbers.
"""

import tensorflow as tf

_INTEGERS = {tf.float32: tf.int32, tf.float64: tf.int64}
_FLOATS = {integer: floats for floats, integer in _INTEGERS.items()}


def to_ordered_integers(x: tf.Tensor, op: str) -> tf.Tensor:
    """Returns integers that are in the order of `x`.

    Args:
        x: Floats of any shape.
        op: `"min"`, which puts NaN below all numbers, or `"max"`, above.
    """
    if x.dtype not in _INTEGERS:  # of 16 bits, which no collective counts in
        x = tf.cast(x, tf.float32)
    integer = _INTEGERS[x.dtype]
    # The NaN beyond all others: all bits set, for "max" but the sign's.
    bits = tf.constant(integer.max if op == "max" else -1, integer)
    x = tf.where(tf.math.is_nan(x), tf.bitcast(bits, x.dtype), x)
    return _flip_negatives(tf.bitcast(x, integer))


def to_floats(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the floats of which `to_integers` made `x`."""
    return tf.cast(tf.bitcast(_flip_negatives(x), _FLOATS[x.dtype]), dtype)


def _flip_negatives(bits: tf.Tensor) -> tf.Tensor:
    """Turns the order of the negative ones round; its own inverse.

    The bits of a float are its sign and then its size.
    """
    places = tf.constant(8 * bits.dtype.size - 1, bits.dtype)
    if_negative = tf.bitwise.right_shift(bits, places)  # all bits, else none
    return tf.bitwise.bitwise_xor(
        bits,
        tf.bitwise.bitwise_and(
            if_negative, tf.constant(bits.dtype.max, bits.dtype)
        ),
    )
