"""Sums over samples as products with a row of ones, in XLA programs.

The gradient of a tensor that is added to each sample alike, such as a vector
for each position, is the sum over all samples. XLA would lay out all
activations so that this sum is fast, with samples innermost, and turn them
around before and after each product. A product asks for no other layout.
"""

import tensorflow as tf

from keras_conflux._extensions.kernels.compiled_shapes import ShapeOf


def replacement(operation: tf.Operation, _: ShapeOf) -> list[tf.Tensor] | None:
    """Returns the product in place of a sum of numbers of 16 bits.

    In float32, a product on GPUs might round to TF32.
    """
    summands, axes = operation.inputs
    shape = summands.shape
    if (
        summands.dtype not in (tf.bfloat16, tf.float16)
        or shape.rank is None
        or shape.rank < 3
        or not shape[1:].is_fully_defined()
        or 0 in shape.as_list()
        or not _are_of_samples(axes, shape)
    ):
        return None
    samples = tf.reshape(summands, [-1, shape[1:].num_elements()])
    ones = tf.ones([1, tf.shape(samples)[0]], summands.dtype)
    # XLA may hand on a sum that has not been rounded to 16 bits.
    wide = tf.raw_ops.BatchMatMulV3(x=ones, y=samples, Tout=tf.float32)
    total = operation.outputs[0]
    return [tf.cast(tf.reshape(wide, tf.shape(total)), total.dtype)]


def _are_of_samples(axes: tf.Tensor, shape: tf.TensorShape) -> bool:
    """Whether axes are the first one alone."""
    known = tf.get_static_value(axes)
    if known is not None:
        return known.ravel().tolist() == [0]
    if axes.op.type != "BroadcastGradientArgs":
        return False
    # These are the axes along which something of this shape was repeated.
    repeated = tf.get_static_value(axes.op.inputs[axes.value_index])
    if repeated is None:
        return False
    missing = shape.rank - len(repeated)
    return [1] * missing + [*repeated] == [1, *shape[1:]]
