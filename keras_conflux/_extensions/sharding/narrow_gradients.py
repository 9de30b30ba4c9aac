"""Gradients in the dtype in which a product has written them.

Two devices send each other these few bytes, and add in the weight's dtype.
"""

from typing import Any

import tensorflow as tf

from keras_conflux._extensions.sharding import order_of_tracing

_PRODUCTS = {"BatchMatMulV2", "Einsum", "MatMul"}
_PRODUCTS |= {"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"}
"""Operations that write sums in the dtype of their result."""


def as_written(gradient: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns a gradient as a product has written it, or else in a dtype.

    Of all but products, XLA may leave out that a gradient had fewer bits in
    between: it adds summands in float32, and casts before it adds up rows.
    """
    source = gradient
    if tf.is_symbolic_tensor(gradient) and gradient.op.type == "Cast":
        source = gradient.op.inputs[0]
    if _is_product(source) and source.dtype.size <= gradient.dtype.size:
        return source
    return tf.convert_to_tensor(tf.cast(gradient, dtype))


def _is_product(tensor: tf.Tensor) -> bool:
    """Whether a product or a convolution has computed a tensor's entries."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    operation = tensor.op
    while operation.type in order_of_tracing.SHAPES:
        operation = operation.inputs[0].op
    return operation.type in _PRODUCTS
