"""Compares what a kind says of a tensor with the tensor's numbers.

A tensor is computed for parts of a batch, as replicas would, and for the batch.
A part of no samples is a stand-in, as that of a replica without samples.
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis.blocks import split_blocks
from keras_conflux._batch_analysis.kinds import COUNTED
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Role


@dataclasses.dataclass
class Numbers:
    """What a tensor is in numbers.

    Args:
        parts: Its values for the parts of the batch.
        whole: Its value for the batch.
        sizes: How many samples each part has.
        blocks: If it was joined of several, those of each part.
    """

    parts: list
    whole: object
    sizes: tuple[int, ...]
    blocks: list | None = None

    @property
    def batch(self):
        return sum(self.sizes)

    def of_samples(self):
        """Returns the values of the parts with samples, and their sizes."""
        pairs = zip(self.parts, self.sizes, strict=True)
        return [(part, size) for part, size in pairs if size]


def unoptimized_session(graph):
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
    )
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return tf.compat.v1.Session(graph=graph, config=config)


def blocks_of(tensor, kind):
    """Returns the tensors that rows were joined of, or `None`."""
    rank = tensor.shape.rank
    if kind.blocks == 1 or (rank is not None and kind.axis not in range(rank)):
        return None
    return split_blocks(tensor, kind)


def combined(kind, numbers):
    """Returns what a kind says that one device has, or `None`."""
    parts = [part for part, _ in numbers.of_samples()]
    if kind.role is Role.EQUAL:
        return parts[0]
    if kind == COUNTED:
        return np.sum(numbers.parts, 0)
    if kind.role in (Role.TOTAL, Role.COUNT):
        return np.sum(parts, 0)
    if kind.role is Role.MEAN:
        sizes = [size for _, size in numbers.of_samples()]
        return np.average(parts, axis=0, weights=sizes)
    if kind.role is Role.SHAPE:
        result = parts[0].copy()
        result[kind.axis] = sum(part[kind.axis] for part in parts)
        return result
    if kind.role is Role.ROWS and not kind.mixed:
        return _joined(kind, numbers)
    return None


def _joined(kind, numbers):
    if kind.are_positions:
        return _places(kind, numbers)
    parts = [
        part * (size / numbers.batch) if kind.divided else part
        for part, size in numbers.of_samples()
    ]
    if kind.blocks == 1:
        return np.concatenate(parts, kind.axis)
    by_block = zip(*numbers.blocks, strict=True)
    samples = [size > 0 for size in numbers.sizes]
    joined = [
        np.concatenate(
            [each for each, has in zip(found, samples, strict=True) if has],
            kind.axis,
        )
        for found in by_block
    ]
    return np.concatenate(joined, kind.axis)


def _places(kind, numbers):
    """Returns positions of samples in the batch, for those in each part."""
    begin, moved = 0, []
    for part, size in numbers.of_samples():
        rows = np.moveaxis(part, kind.axis, 0)
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).copy()
        if not np.all((flat[:, 0] >= 0) & (flat[:, 0] < size)):
            raise ValueError("not positions of samples")
        flat[:, 0] += begin
        moved.append(np.moveaxis(flat.reshape(rows.shape), 0, kind.axis))
        begin += size
    return np.concatenate(moved, kind.axis)


def fault(kind, numbers):
    """Returns what is wrong with a claim, or `None` if the numbers are so."""
    try:
        return _fault(kind, numbers)
    except (ValueError, IndexError, TypeError) as error:
        return str(error) or "no such axis"


def _fault(kind, numbers):
    if kind.role is Role.EQUAL and not all(
        are_close(part, numbers.whole) for part in numbers.parts
    ):
        return "not equal"
    if kind.role is Role.RANDOM and any(
        np.shape(part) != np.shape(numbers.whole) for part in numbers.parts
    ):
        return "drawn of other shapes"
    if kind.role is Role.COUNT and not all(
        are_close(part * numbers.batch, numbers.whole * size)
        for part, size in numbers.of_samples()
    ):
        return "no number per sample"
    if kind.role is Role.ROWS:
        wrong = _fault_of_lengths(kind, numbers)
        if wrong:
            return wrong
    if kind.role is Role.SHAPE and kind.regular:
        for part, size in numbers.of_samples():
            if (
                part[kind.axis] * numbers.batch
                != numbers.whole[kind.axis] * size
            ):
                return "not as many entries for each sample"
    expected = combined(kind, numbers)
    if expected is None:
        return None
    if np.shape(expected) != np.shape(numbers.whole):
        return f"{np.shape(expected)} for {np.shape(numbers.whole)}"
    if not are_close(expected, numbers.whole):
        return f"{expected} for {numbers.whole}"
    return None


def _fault_of_lengths(kind, numbers):
    of_whole = list(np.shape(numbers.whole))
    entries = of_whole.pop(kind.axis)
    for part, size in numbers.of_samples():
        others = list(np.shape(part))
        rows = others.pop(kind.axis)
        if others != of_whole:
            return f"other axes are {others} for {of_whole}"
        if kind.entries is Entries.ONE and rows != size:
            return f"{rows} rows of {size} samples"
        if kind.regular and rows * numbers.batch != entries * size:
            return f"{rows} rows of {size} samples, {entries} of all"
    return None


def are_close(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        return False
    if got.dtype.kind in "OSU":
        return bool(np.all(got == expected))
    wide = "complex128" if got.dtype.kind == "c" else "float64"
    rtol, atol = _TOLERANCES.get(str(got.dtype), (1e-6, 1e-9))
    return np.allclose(
        got.astype(wide), expected.astype(wide), rtol, atol, equal_nan=True
    )


_TOLERANCES = {
    "float32": (1e-4, 1e-5),
    "complex64": (1e-4, 1e-5),
}
