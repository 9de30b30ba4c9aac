"""The numbers in a graph that are known while it is traced."""

from typing import Any

import numpy as np
import tensorflow as tf


def _slice(value: Any, begin: Any, size: Any) -> Any:
    ends = [None if n < 0 else b + n for b, n in zip(begin, size, strict=True)]
    return value[tuple(map(slice, begin, ends))]


def _concatenated(*parts: Any) -> Any:
    *values, axis = parts
    return np.concatenate(values, axis)


_ARITHMETIC = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorMod": np.mod,
    "ConcatV2": _concatenated,
    "InvertPermutation": np.argsort,
    "Range": np.arange,
    "Reshape": np.reshape,
    "Slice": _slice,
}


def static_value(tensor: tf.Tensor) -> Any:
    """Returns a tensor's value, also if it is computed from known ones.

    `tf.get_static_value` does no arithmetic, as in `tf.shape(x)[tf.rank(x) -
    1]`.
    """
    value = tf.get_static_value(tensor)
    operation = tensor.op
    if value is not None or operation.type not in (*_ARITHMETIC, "Pack"):
        return value
    parts = [static_value(part) for part in operation.inputs]
    if any(part is None for part in parts):
        return None
    if operation.type == "Pack":
        return np.stack(parts, operation.get_attr("axis"))
    return _ARITHMETIC[operation.type](*parts)
