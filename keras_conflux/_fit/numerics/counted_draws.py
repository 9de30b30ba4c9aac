"""Draws numbers from the middle of a seed's sequence.

TensorFlow's generators are counted: from each count they make a group of
numbers, of 16 bytes in all. So the numbers of some rows are drawn by beginning
at the count of the first. Where rows do not begin with a group, up to three
rows before them are drawn as well.

The counts come from `StatelessRandomGetKeyCounter`, and begin at 0 in the
first of two words of 64 bits, so that no sum goes beyond it.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._fit.numerics import draws_by_xla
from keras_conflux._replication import steps
from keras_conflux._replication.strategy import current_strategy

_ALGORITHM = tf.random.Algorithm.AUTO_SELECT.value


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A raw operation that draws from one distribution, and its counts."""

    operation: Callable
    """A raw operation of a shape, a key, a counter and an algorithm."""
    dtype: tf.DType
    """The dtype of its numbers."""
    counts: int = 1
    """How many counts each group takes in TensorFlow's kernels."""
    counts_in_xla: int | None = 1
    """The same where XLA compiles it; `None` if the numbers depend on the whole
    shape there."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Other arguments of the operation."""

    @property
    def is_counted(self) -> bool:
        """Whether rows can be drawn alone here."""
        return self._counts() is not None

    def _counts(self) -> Any:
        by_xla = draws_by_xla.are_by_xla()
        return self.counts_in_xla if by_xla else self.counts

    @property
    def group(self) -> int:
        """How many numbers are made of one count, or of some."""
        return 2 if self.dtype.size == 8 else 4

    def whole(self, shape: Any, seed: tf.Tensor) -> tf.Tensor:
        """Draws all numbers that a seed gives for a shape.

        Args:
            shape: Sizes, or a tensor of them.
            seed: Two integers of 32 bits.
        """
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        return self._drawn(shape, key, counter)

    def rows(
        self,
        begins: Sequence[Any],
        shapes: Sequence[Any],
        rest: Sequence[Any],
        seed: tf.Tensor,
    ) -> tf.Tensor:
        """Draws some of the rows that a seed gives.

        Args:
            begins: The begin of each block of rows: uint64.
            shapes: The shape of each block: a tensor.
            rest: The sizes of a row, numbers where they are known.
            seed: Two integers of 32 bits.
        """
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        size = _product(rest)
        known = size if isinstance(size, int) else 1
        unit = self.group // math.gcd(known, self.group)
        counts = size * unit // self.group * self._counts()  # of `unit` rows
        parts = []
        for begin, shape in zip(begins, shapes, strict=True):
            if unit == 1:
                first = _moved(counter, begin, counts)
                parts.append(self._drawn(shape, key, first))
                continue
            # From a row on that begins with a group.
            first = _moved(counter, begin // unit, counts)
            of_rows = np.eye(1, len(rest) + 1, dtype="int32")[0]
            drawn = self._drawn(shape + (unit - 1) * of_rows, key, first)
            before = tf.cast(begin % unit, tf.int32) * of_rows
            parts.append(tf.slice(drawn, before, shape))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def _drawn(self, shape: Any, key: Any, counter: Any) -> tf.Tensor:
        return self.operation(
            shape=shape,
            key=key,
            counter=counter,
            alg=_ALGORITHM,
            **dict(self.arguments),
        )


def _by_xla(operation: Callable) -> Callable:
    """Returns an operation that draws by XLA where one device does."""
    return functools.partial(draws_by_xla.draw, operation)


def uniform(dtype: Any) -> Sampler:
    """Draws from 0 to 1."""
    dtype = tf.as_dtype(dtype)
    return Sampler(
        _by_xla(tf.raw_ops.StatelessRandomUniformV2),
        dtype,
        arguments=(("dtype", dtype),),
    )


def normal(dtype: Any) -> Sampler:
    """Draws with a mean of 0 and a deviation of 1."""
    dtype = tf.as_dtype(dtype)
    return Sampler(
        _by_xla(tf.raw_ops.StatelessRandomNormalV2),
        dtype,
        # XLA makes pairs of numbers that lie half of an axis apart.
        counts_in_xla=None,
        arguments=(("dtype", dtype),),
    )


def truncated_normal(dtype: Any) -> Sampler:
    """Draws the same within two deviations."""
    dtype = tf.as_dtype(dtype)
    return Sampler(
        _by_xla(tf.raw_ops.StatelessTruncatedNormalV2),
        dtype,
        # Kernels redraw rejected numbers, for which they reserve counts.
        counts=128 if dtype.size == 8 else 256,
        arguments=(("dtype", dtype),),
    )


def integers(minval: Any, maxval: Any, dtype: Any) -> Sampler:
    """Draws integers of 32 or 64 bits, which XLA makes as kernels do."""
    dtype = tf.as_dtype(dtype)
    return Sampler(
        tf.raw_ops.StatelessRandomUniformIntV2,
        dtype,
        arguments=(
            ("minval", tf.convert_to_tensor(minval, dtype)),
            ("maxval", tf.convert_to_tensor(maxval, dtype)),
        ),
    )


def on_host() -> contextlib.AbstractContextManager:
    """Keeps computations with a few integers from a replica's GPU."""
    if steps.current() is None or draws_by_xla.in_xla():
        return contextlib.nullcontext()
    if current_strategy().devices[0].kind != "GPU":
        return contextlib.nullcontext()
    return tf.device("CPU:0")


def _moved(counter: tf.Tensor, units: Any, counts: Any) -> tf.Tensor:
    """Returns a counter of some units of rows later."""
    with on_host():
        if isinstance(counts, int):
            word = tf.constant([counts, 0], tf.uint64)
        else:
            word = tf.stack([counts, tf.zeros_like(counts)])
        return counter + units * word


def _product(sizes: Sequence[Any]) -> Any:
    """Returns how many numbers a row has, as an `int` if that is known."""
    known = math.prod(n for n in sizes if isinstance(n, int))
    unknown = [tf.cast(n, tf.uint64) for n in sizes if not isinstance(n, int)]
    return math.prod(unknown, start=known)
