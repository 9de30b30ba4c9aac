"""Gradients of the largest entries of windows, as sums over windows.

XLA keeps the position of the largest entry of each window as four numbers, and
adds gradients at these positions one by one. Here, the position is one small
number, by which the gradients are spread, once for each entry of a window.
"""

from itertools import product
from typing import Any
from typing import NamedTuple

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
    for place, at in enumerate(product(range(rows.size), range(columns.size))):
        given = tf.where(tf.equal(largest, place), upstream, zero)
        parts.append(_spread(given, windows, at))
    found = tf.add_n(parts)[:, : rows.length, : columns.length]
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
    given = (each[1:3] for each in (sizes, strides, outputs, inputs))
    found = tuple(map(_Windows, *given))
    # With more behind the end, the first window would start before the start.
    starts = all(each.end <= each.length + 1 for each in found)
    return found if starts else None


def _places_of_largest(
    inputs: tf.Tensor, rows: _Windows, columns: _Windows
) -> tf.Tensor:
    """Returns which entry of each window is the first of the largest."""
    behind = [[0, max(0, each.end - each.length)] for each in (rows, columns)]
    pads, least = [[0, 0], *behind, [0, 0]], -float("inf")
    padded = tf.pad(inputs, pads, constant_values=least)
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


def _spread(
    given: tf.Tensor, windows: tuple[_Windows, ...], at: tuple[int, ...]
) -> tf.Tensor:
    """Returns zeros with a number of each window at one of its entries.

    The numbers have the shape `[samples, rows, columns, channels]`.
    """
    apart = [[[0, 0], [0, each.stride - 1]] for each in windows]
    pads = [[0, 0], *apart[0], *apart[1], [0, 0]]
    given = tf.pad(given[:, :, None, :, None], pads)
    lengths = [each.count * each.stride for each in windows]
    given = tf.reshape(given, [-1, *lengths, given.shape[-1]])
    around = [
        [before, each.size - before]
        for before, each in zip(at, windows, strict=True)
    ]
    return tf.pad(given, [[0, 0], *around, [0, 0]])
