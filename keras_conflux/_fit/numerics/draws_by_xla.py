"""Draws by XLA where one device does, also in batches that run as a graph.

Of the same random bits TensorFlow's kernels and XLA make other numbers. A model
that XLA compiles runs some batches as a graph, as a smaller last one, and which
ones may depend on how long they take. So each such draw is a small program of
XLA in that graph.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._compat import error_texts
from keras_conflux._compat import keras_models
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._replication import steps

_ATTRIBUTES = ("alg", "dtype", "name", "output_dtype")
"""Arguments of an operation that draws which are no tensors."""


def draw(original: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Draws XLA's numbers in a step that one device has XLA compile.

    Args:
        original: An operation that draws.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.
    """
    if in_xla() or not are_by_xla():
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
    return (
        model is not None
        and model.jit_compile
        and not keras_models.runs_eagerly(model)
    )


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
