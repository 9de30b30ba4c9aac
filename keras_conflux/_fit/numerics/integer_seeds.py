"""Random numbers of an integer seed, which are constants of the program.

One device draws the same numbers for each batch, a row for each sample. So a
replica draws those of the global batch and takes the rows of its own samples.
Numbers that are no rows of samples, such as those of a fixed projection, are
the same on all replicas anyway.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._data import rows
from keras_conflux._fit.global_batch.kinds import COUNT
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import rows as rows_along
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_collectives

ROWS = rows_along(0)


def draw(original: Callable, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in front of the functions that take the shape of the numbers."""
    context = _context(kwargs)
    if context is None:
        return original(shape, *args, **kwargs)
    sizes = _sizes(shape)
    window = _window(context, sizes[0]) if sizes else None
    if window is None:
        return original(shape, *args, **kwargs)
    parameters = [context.kinds.of(x) for x in (*args, *kwargs.values())]
    args = tuple(window.place_parameter(x, len(sizes)) for x in args)
    kwargs = {
        name: window.place_parameter(x, len(sizes))
        for name, x in kwargs.items()
    }
    drawn = window.take(original([window.total, *sizes[1:]], *args, **kwargs))
    one_each = context.kinds.of(sizes[0]) == COUNT
    if one_each and all(kind in (EQUAL, ROWS) for kind in parameters):
        context.kinds.mark(drawn, ROWS)
    return drawn


def draw_for(original: Callable, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in front of those that take a tensor of a row for each sample."""
    context = _context(kwargs)
    inputs = tf.convert_to_tensor(inputs)
    window = None
    if context is not None and inputs.shape.rank:
        window = _window(context, rows.length_of(inputs))
    if window is None:
        return original(inputs, *args, **kwargs)
    noise_shape = kwargs.get("noise_shape")
    if noise_shape is not None:
        first = noise_shape[0]
        is_one = isinstance(first, int) and first == 1
        # Of `None`, Keras takes the size of the inputs.
        kwargs["noise_shape"] = (1 if is_one else None, *noise_shape[1:])
    placed = window.place_rows(inputs)
    drawn = window.take(original(placed, *args, **kwargs))
    # The graph does not show that these are rows of the same samples.
    if context is not None and drawn.shape.rank == inputs.shape.rank:
        context.kinds.mark(drawn, context.kinds.of(inputs))
    return drawn


class _Window:
    """The rows of a replica's samples among those of the global batch."""

    def __init__(self, begin: Any, length: Any, total: Any) -> None:
        self.begin, self.length, self.total = (
            tf.cast(size, tf.int32) for size in (begin, length, total)
        )

    def take(self, drawn: tf.Tensor) -> tf.Tensor:
        return drawn[self.begin : self.begin + self.length]

    def place_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Puts rows where they are in the global batch, between ones."""
        after = self.total - self.begin - self.length
        return _padded(rows, tf.stack([self.begin, after]))

    def place_parameter(self, value: Any, rank: int) -> Any:
        """Places a mean or the like, which has one row for all or a row each.

        One row for each of one sample may be taken for that of all.
        """
        if not tf.is_tensor(value) or value.shape.rank != rank:
            return value
        after = self.total - self.begin - self.length
        added = tf.stack([self.begin, after])
        return _padded(value, tf.where(tf.shape(value)[0] == 1, 0, added))


def _padded(tensor: tf.Tensor, added: tf.Tensor) -> tf.Tensor:
    padding = tf.pad([added], [[0, tensor.shape.rank - 1], [0, 0]])
    return tf.pad(tensor, padding, constant_values=tf.ones((), tensor.dtype))


def _context(kwargs: dict[str, Any]) -> StepContext | None:
    """Returns the step's context if its numbers are those of its samples."""
    context = step_context.current_fit_step()
    if context is None or not isinstance(kwargs.get("seed"), int):
        return None
    return context if replica_collectives().count > 1 else None


def _sizes(shape: Any) -> Sequence[Any]:
    return tf.unstack(shape) if tf.is_tensor(shape) else list(shape)


def _window(context: StepContext, length: Any) -> _Window | None:
    """Returns which rows are this replica's, or `None` if not such rows.

    Args:
        context: The step's.
        length: The number of rows: as many as the replica has samples, or of
            another meaning.
    """
    leaves = [x for x in trees.present(context.shard) if len(x.shape)]
    counts = [rows.length_of(leaf) for leaf in leaves]
    if not tf.is_tensor(length):
        if length not in [n for n in counts if not tf.is_tensor(n)]:
            return None
        if context.graph is not None:
            # It may be the size of something else by chance.
            context.counts_rows = "draws random numbers of an integer seed"
            return None
    length = tf.cast(length, tf.int64)
    fraction = tf.where(context.batch_fraction > 0, context.batch_fraction, 1)
    total = tf.cast(tf.round(tf.cast(length, tf.float32) / fraction), tf.int64)
    before = tf.cast(total, tf.float32) * context.batch_offset
    begin = tf.cast(tf.round(before), tf.int64)
    begin = tf.minimum(begin, total - length)
    of_samples = tf.reduce_any([tf.cast(n, tf.int64) == length for n in counts])
    return _Window(
        tf.where(of_samples, begin, 0),
        length,
        tf.where(of_samples, total, length),
    )
