"""Convolutions whose kernel is one position, as products of two matrices.

For such a convolution cuDNN has tens of algorithms, each of which XLA builds
and times before the first step. Of a product, cuBLASLt has them built.
"""

import string
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._extensions.kernels import dense_products


def conv(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Computes a convolution of single positions within an XLA program."""
    result = None
    if dense_products.traces_for_xla():
        result = _product(*args, **kwargs)
    return original(*args, **kwargs) if result is None else result


def _product(
    inputs: Any,
    kernel: Any,
    strides: Any = 1,
    padding: Any = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
) -> tf.Tensor | None:
    """Returns the product, or `None` where it is Keras' to compute."""
    if not (isinstance(inputs, tf.Tensor) and _has_shape(inputs, kernel)):
        return None
    axes = inputs.shape.rank - 2
    steps = _each(strides, axes)
    usual = keras.config.image_data_format()
    is_product = (
        axes > 0
        and [*kernel.shape[:-1]] == [1] * axes + [inputs.shape[-1]]  # one group
        and None not in [*inputs.shape[1:], kernel.shape[-1]]
        and steps
        and _each(dilation_rate, axes) == [1] * axes
        and padding in ("valid", "same")  # which differ for larger kernels
        and (data_format or usual) == "channels_last"
    )
    if not is_product:
        return None
    if steps != [1] * axes:
        slices = [slice(None, None, step) for step in steps]
        inputs = inputs[(slice(None), *slices)]
    matrix = keras_variables.as_tensor(kernel)
    matrix = tf.squeeze(matrix, [*range(axes)])
    rows = string.ascii_lowercase[: axes + 1]
    return dense_products.product(f"{rows}x,xy->{rows}y", inputs, matrix)


def _has_shape(*tensors: Any) -> bool:
    """Whether these are tensors or variables with a known number of axes."""
    return all(
        isinstance(x, (tf.Tensor, tf.Variable, keras.Variable))
        and tf.TensorShape(x.shape).rank is not None
        for x in tensors
    )


def _each(numbers: Any, axes: int) -> list[int]:
    """Returns a number for each axis, or none if these are no such numbers."""
    several = isinstance(numbers, (list, tuple))
    each = [*numbers] if several else [numbers] * axes
    are_numbers = all(isinstance(x, int) and x > 0 for x in each)
    return each if are_numbers and len(each) == axes else []
