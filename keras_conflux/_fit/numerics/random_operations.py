"""TensorFlow's operations that draw, as one device runs them.

Its generators are counted: from each count they make a group of numbers, of 16
bytes in all. The counts come from `StatelessRandomGetKeyCounter`, and begin at
0 in the first of two words of 64 bits, so that no sum goes beyond it.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._compat import error_texts
from keras_conflux._compat import keras_models
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._replication import steps
from keras_conflux._replication.strategy import current_strategy

_ATTRIBUTES = ("alg", "dtype", "name", "output_dtype")
"""Arguments of an operation that draws which are no tensors."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """An operation that draws from one distribution, by a seed."""

    original: Callable
    """An operation of a shape, a key, a counter and others."""
    given: dict[str, Any]
    """Its arguments, but for the shape."""

    @property
    def dtype(self) -> tf.DType:
        """The dtype of its numbers."""
        dtype = self.given.get("dtype") or self.given["minval"].dtype
        return tf.as_dtype(dtype)

    @property
    def is_counted(self) -> bool:
        """Whether rows can be drawn alone here."""
        # XLA makes pairs of normal numbers that lie half of an axis apart.
        return "random_normal" not in self.original.__name__ or not are_by_xla()

    def _counts(self) -> int:
        """Returns how many counts each group takes."""
        if "truncated" not in self.original.__name__ or are_by_xla():
            return 1
        # Kernels redraw rejected numbers, for which they reserve counts.
        return 128 if self.dtype.size == 8 else 256

    def whole(self, shape: Any) -> tf.Tensor:
        """Draws all numbers of a shape: sizes, or a tensor of them."""
        return draw(self.original, shape=shape, **self.given)

    def rows(
        self, begins: Sequence[Any], shapes: Sequence[Any], rest: Sequence[Any]
    ) -> tf.Tensor:
        """Draws some of the rows.

        Each block of rows has a begin (uint64) and a shape (a tensor). `rest`
        has the sizes of a row, numbers where they are known.
        """
        size = _product(rest)
        known = size if isinstance(size, int) else 1
        group = 2 if self.dtype.size == 8 else 4
        unit = group // math.gcd(known, group)
        counts = size * unit // group * self._counts()  # of `unit` rows
        parts = []
        for begin, shape in zip(begins, shapes, strict=True):
            if unit == 1:
                parts.append(self._later(begin, counts).whole(shape))
                continue
            # From a row on that begins with a group.
            later = self._later(begin // unit, counts)
            of_rows = np.eye(1, len(rest) + 1, dtype="int32")[0]
            drawn = later.whole(shape + (unit - 1) * of_rows)
            before = tf.cast(begin % unit, tf.int32) * of_rows
            parts.append(tf.slice(drawn, before, shape))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def _later(self, units: Any, counts: Any) -> "Sampler":
        """Returns the draws that begin some units of rows later."""
        with on_host():
            word = tf.convert_to_tensor([counts, 0], tf.uint64)
            counter = self.given["counter"] + units * word
        return Sampler(self.original, self.given | {"counter": counter})


def _product(sizes: Sequence[Any]) -> Any:
    """Returns how many numbers a row has, as an `int` if that is known."""
    known = math.prod(n for n in sizes if isinstance(n, int))
    unknown = [tf.cast(n, tf.uint64) for n in sizes if not isinstance(n, int)]
    return math.prod(unknown, start=known)


def on_host() -> contextlib.AbstractContextManager:
    """Keeps computations with a few integers from a replica's GPU."""
    in_graph = steps.current() is not None and not in_xla()
    on_gpu = in_graph and current_strategy().devices[0].kind == "GPU"
    return tf.device("CPU:0") if on_gpu else contextlib.nullcontext()


def draw(original: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Draws XLA's numbers in a step that one device has XLA compile.

    XLA makes integers, which have a `minval`, as kernels do.
    """
    if in_xla() or not are_by_xla() or "minval" in kwargs:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    attributes = {x: given.pop(x) for x in _ATTRIBUTES if x in given}
    attributes.pop("name", None)
    tensors = {x: tf.convert_to_tensor(given[x]) for x in given}
    with tf.init_scope(), steps.entered(None):
        program = _program(original, tuple(attributes.items()))
        traced = program and program.get_concrete_function(
            **{x: tf.TensorSpec.from_tensor(y) for x, y in tensors.items()}
        )
    return traced(**tensors) if traced else original(*args, **kwargs)


def are_by_xla() -> bool:
    """Whether XLA makes the numbers that are drawn here."""
    if in_xla():
        return True
    step = steps.current_fit_step()
    model = None if step is None else step.model
    return model is not None and keras_models.is_compiled(model)


def in_xla() -> bool:
    """Whether XLA compiles the current graph."""
    return steps.in_xla() or tensorflow_tracing.in_compiled_function()


@functools.cache
def _program(operation: Callable, attributes: tuple) -> Any:
    """Returns a program that draws, or `None` where XLA cannot compile it."""

    def drawn(**tensors: tf.Tensor) -> tf.Tensor:
        # Of constants, TensorFlow would compute it once, by its kernels.
        name = "key" if "key" in tensors else "seed"
        zero = tf.raw_ops.Empty(shape=[], dtype=tensors[name].dtype, init=True)
        tensors[name] += zero
        return operation(**tensors, **dict(attributes))

    program = tf.function(
        tf.autograph.experimental.do_not_convert(drawn), jit_compile=True
    )
    try:
        program(**_any_arguments(operation))
    except tf.errors.OpError as error:
        if not error_texts.is_of_compiler(error):
            raise
        return None  # a step that is compiled tells of it
    return program


def _any_arguments(operation: Callable) -> dict[str, tf.Tensor]:
    """Returns tensors that an operation can take."""
    known = {
        "shape": tf.constant([1]),
        "key": tf.zeros([1], tf.uint64),
        "counter": tf.zeros([2], tf.uint64),
        "logits": tf.zeros([1, 1]),
        "num_samples": tf.constant(1),
        "seed": tf.zeros([2], tf.int32),
    }
    names = inspect.signature(operation).parameters
    return {x: known[x] for x in names if x not in _ATTRIBUTES}
