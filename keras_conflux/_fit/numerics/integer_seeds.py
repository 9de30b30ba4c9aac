"""Random numbers of an integer seed, which are constants of the program.

One device draws the same numbers for each batch, a row for each sample. So a
replica draws those of the global batch and takes the rows of its own samples.
Numbers that are no rows of samples, such as those of a fixed projection, are
the same on all replicas anyway.

There may be several rows for each sample. Where tensors of samples have been
joined, as two views of a batch are, each of them is a block, which has its own
rows of all samples.
"""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._data import rows
from keras_conflux._fit.global_batch.kinds import COUNT
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Role
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
    window = None
    if sizes:
        blocks = _blocks_of_size(sizes[0], context)
        kind = context.kinds.of(sizes[0])
        window = _window(context, sizes[0], blocks, kind == COUNT)
    if window is None:
        return original(shape, *args, **kwargs)
    parameters = [context.kinds.of(x) for x in (*args, *kwargs.values())]
    args = tuple(window.place_parameter(x, len(sizes)) for x in args)
    kwargs = {
        name: window.place_parameter(x, len(sizes))
        for name, x in kwargs.items()
    }
    drawn = window.take(original([window.total, *sizes[1:]], *args, **kwargs))
    of_blocks = dataclasses.replace(ROWS, blocks=window.blocks)
    one_each = context.kinds.of(sizes[0]) == COUNT
    if one_each and all(kind in (EQUAL, of_blocks) for kind in parameters):
        # The graph does not show that these are rows of the same samples.
        context.kinds.mark(drawn, of_blocks)
    return drawn


def draw_for(original: Callable, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in front of those that take a tensor of a row for each sample."""
    context = _context(kwargs)
    inputs = tf.convert_to_tensor(inputs)
    window = None
    if context is not None and inputs.shape.rank:
        kind = context.kinds.of(inputs)
        is_of_samples = (
            kind.role is Role.ROWS and kind.axis == 0 and kind.regular
        )
        window = _window(
            context, rows.length_of(inputs), kind.blocks, is_of_samples
        )
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
    """The rows of a replica's samples among those of the global batch.

    Args:
        begin: Where they begin in each block.
        length: How many they are in each block.
        total: How many rows each block has.
        blocks: How many there are.
    """

    def __init__(
        self, begin: Any, length: Any, total: Any, blocks: int
    ) -> None:
        self.begin, self.length, self.of_block = (
            tf.cast(size, tf.int32) for size in (begin, length, total)
        )
        self.blocks = blocks

    @property
    def total(self) -> Any:
        """How many rows there are in all."""
        return self.of_block * self.blocks

    def take(self, drawn: tf.Tensor) -> tf.Tensor:
        begins = [
            self.begin + block * self.of_block for block in range(self.blocks)
        ]
        parts = [drawn[begin : begin + self.length] for begin in begins]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def place_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Puts rows where they are in the global batch, between ones."""
        begins = [block * self.length for block in range(self.blocks)]
        parts = [rows[begin : begin + self.length] for begin in begins]
        after = self.of_block - self.begin - self.length
        added = tf.stack([self.begin, after])
        return tf.concat([_padded(part, added) for part in parts], 0)

    def place_parameter(self, value: Any, rank: int) -> Any:
        """Places a mean or the like, which has one row for all or a row each.

        One row for each of one sample may be taken for that of all.
        """
        if not tf.is_tensor(value) or value.shape.rank != rank:
            return value
        if self.blocks > 1:
            sizes = tf.shape(value)
            number = tf.reshape(self.length * self.blocks, [1])
            each = tf.concat([number, sizes[1:]], 0)
            return self.place_rows(tf.broadcast_to(value, each))
        after = self.of_block - self.begin - self.length
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


def _blocks_of_size(size: Any, context: StepContext) -> int:
    """Returns of how many tensors of samples a number of rows is the sum.

    What the graph does not show counts as one.
    """
    if not isinstance(size, tf.Tensor) or tf.executing_eagerly():
        return 1
    inputs = list(size.op.inputs)
    if size.op.type in ("Cast", "Identity"):
        return _blocks_of_size(inputs[0], context)
    if size.op.type in ("Add", "AddV2"):
        return sum(_blocks_of_size(each, context) for each in inputs)
    if size.op.type == "Mul":
        known = [tf.get_static_value(each) for each in inputs]
        blocks = [_blocks_of_size(each, context) for each in inputs]
        return math.prod(
            each if value is None else max(int(value), 1)
            for each, value in zip(blocks, known, strict=True)
        )
    if size.op.type in ("StridedSlice", "Unpack"):
        shape = inputs[0].op
        if shape.type == "Shape":
            return context.kinds.of(shape.inputs[0]).blocks
    return 1


def _window(
    context: StepContext, length: Any, blocks: int, is_of_samples: bool
) -> _Window | None:
    """Returns which rows are this replica's, or `None` if not such rows.

    Args:
        context: The step's.
        length: The number of rows.
        blocks: Of how many blocks they are.
        is_of_samples: Whether there are as many for each of the replica's
            samples. If not, they are if there is one for each.
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
    length = tf.cast(length, tf.int64) // blocks
    fraction = tf.where(context.batch_fraction > 0, context.batch_fraction, 1)
    total = tf.cast(tf.round(tf.cast(length, tf.float32) / fraction), tf.int64)
    before = tf.cast(total, tf.float32) * context.batch_offset()
    begin = tf.cast(tf.round(before), tf.int64)
    begin = tf.minimum(begin, total - length)
    each = tf.stack([tf.cast(n, tf.int64) for n in counts])
    fits = length % each == 0 if is_of_samples else length == each
    of_samples = tf.reduce_any(fits)
    return _Window(
        tf.where(of_samples, begin, 0),
        length,
        tf.where(of_samples, total, length),
        blocks,
    )
