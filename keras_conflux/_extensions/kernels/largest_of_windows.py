"""Gradients of the largest entries of windows, as sums over windows.

XLA keeps the position of the largest entry of each window as four numbers, and
adds gradients at these positions one by one. Here, the position is one small
number, and each entry adds up the gradients of the windows around it.
"""

from itertools import product
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_conflux._extensions.kernels.compiled_shapes import ShapeOf

_MOST = 9
"""How many entries a window may have, as each adds to the program."""


class _Windows(NamedTuple):
    """Windows along one axis, of which the first starts at its start."""

    size: int
    stride: int
    count: int
    length: int

    @property
    def end(self) -> int:
        """Where the last window ends, which may be behind the axis' end."""
        return (self.count - 1) * self.stride + self.size

    @property
    def shifts(self) -> int:
        """The most windows that an entry is in."""
        return -(-self.size // self.stride)

    @property
    def strides(self) -> int:
        """How many strides cover the axis and all windows."""
        covered = -(-self.length // self.stride)
        return max(covered, self.count + self.shifts - 1)


def replacement(operation: tf.Operation, _: ShapeOf) -> list[tf.Tensor] | None:
    """Returns the gradient, which the first of equal entries has."""
    inputs, upstream = operation.inputs[0], operation.inputs[2]
    windows = _windows(operation)
    if windows is None:
        return None
    rows, columns = windows
    largest = _places_of_largest(inputs, rows, columns)
    zero = tf.zeros([], upstream.dtype)
    parts = []
    for shift in product(range(rows.shifts), range(columns.shifts)):
        given = _by_strides(upstream, windows, shift)
        is_mine = tf.equal(
            _by_strides(largest, windows, shift), _places(windows, shift)
        )
        parts.append(tf.where(is_mine, given, zero))
    lengths = [each.strides * each.stride for each in windows]
    total = tf.reshape(tf.add_n(parts), [-1, *lengths, inputs.shape[3]])
    found = total[:, : rows.length, : columns.length]
    return [tf.ensure_shape(found, operation.outputs[0].shape)]


def _windows(operation: tf.Operation) -> tuple[_Windows, ...] | None:
    """Returns the windows of rows and columns, where this can replace."""
    shapes: list[Any] = [each.shape for each in operation.inputs]
    inputs, outputs = shapes[:2]
    sizes, strides = (operation.get_attr(name) for name in ("ksize", "strides"))
    if (
        not operation.inputs[0].dtype.is_floating
        or operation.get_attr("data_format") != b"NHWC"
        or operation.get_attr("padding") == b"EXPLICIT"
        or not inputs[1:].is_fully_defined()
        or not outputs[1:].is_fully_defined()
        or not sizes[0] == sizes[3] == strides[0] == strides[3] == 1
        or sizes[1] * sizes[2] > _MOST
    ):
        return None
    found = tuple(
        _Windows(*each)
        for each in zip(
            sizes[1:3], strides[1:3], outputs[1:3], inputs[1:3], strict=True
        )
    )
    # With more behind the end, the first window would start before the start.
    starts = all(each.end <= each.length + 1 for each in found)
    return found if starts else None


def _places_of_largest(
    inputs: tf.Tensor, rows: _Windows, columns: _Windows
) -> tf.Tensor:
    """Returns which entry of each window is the first of the largest."""
    behind = [[0, max(0, each.end - each.length)] for each in (rows, columns)]
    padded = tf.pad(
        inputs, [[0, 0], *behind, [0, 0]], constant_values=-float("inf")
    )
    entries = [
        padded[
            :,
            i : i + rows.end - rows.size + 1 : rows.stride,
            j : j + columns.end - columns.size + 1 : columns.stride,
        ]
        for i, j in product(range(rows.size), range(columns.size))
    ]
    best, places = entries[0], tf.zeros_like(entries[0], tf.int8)
    for place, entry in enumerate(entries[1:], 1):
        is_larger = tf.greater(entry, best)
        best = tf.where(is_larger, entry, best)
        places = tf.where(is_larger, tf.constant(place, tf.int8), places)
    return places


def _by_strides(
    tensor: tf.Tensor, windows: tuple[_Windows, ...], shift: tuple[int, ...]
) -> tf.Tensor:
    """Returns, for each stride along both axes, a number of one window.

    Args:
        tensor: Numbers of windows, of the shape
            `[samples, rows, columns, channels]`.
        windows: The windows along rows and columns.
        shift: The number of strides by which the window starts earlier.

    Returns:
        A tensor of the shape
        `[samples, strides of rows, 1, strides of columns, 1, channels]`.
    """
    around = [
        [before, each.strides - before - each.count]
        for before, each in zip(shift, windows, strict=True)
    ]
    return tf.pad(tensor, [[0, 0], *around, [0, 0]])[:, :, None, :, None]


def _places(windows: tuple[_Windows, ...], shift: tuple[int, ...]) -> tf.Tensor:
    """Returns which entry of a window each entry of a stride is.

    Args:
        windows: The windows along rows and columns.
        shift: The number of strides by which the window starts earlier.

    Returns:
        A tensor of the shape `[stride of rows, 1, stride of columns, 1]`.
    """
    rows, columns = windows
    places = np.full([each.shifts * each.stride for each in windows], -1)
    in_window = places[: rows.size, : columns.size]
    in_window.flat = range(in_window.size)
    stride = places[
        tuple(
            slice(before * each.stride, (before + 1) * each.stride)
            for before, each in zip(shift, windows, strict=True)
        )
    ]
    return tf.constant(stride[:, None, :, None], tf.int8)
