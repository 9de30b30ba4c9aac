"""Gathers the rows that replicas have, in the order of the samples."""

from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import split_blocks
from keras_conflux._communication import dtypes
from keras_conflux._communication.transports.ops import SUM
from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat import tensorflow_xla
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.replica_context import replica_rank
from keras_conflux._replication.steps import Part
from keras_conflux._replication.steps import Step


class _GatheredBlock:
    """Rows of all replicas that were not joined with others.

    A replica without samples, which runs on a stand-in, adds none.
    """

    def __init__(self, source: tf.Tensor, axis: int) -> None:
        self._axis = axis
        self._source = source
        self.length: Any = tf.shape(source)[axis]
        self.before: Any = 0
        """How many rows the replicas before this one have."""
        self.total = self.length
        """How many rows all replicas have."""
        self.all = source

    def placed(self, in_xla: bool) -> tf.Tensor:
        """Returns this replica's rows where all will have them."""
        mine = self._resized(self._source, 0, self.length)
        summable = dtypes.as_summable(mine)
        neutral = SUM.neutral(summable.dtype)
        if in_xla:
            at = _is_axis(summable, self._axis)
            sizes = tf.where(at, self.total, tf.shape(summable))
            begins = tf.where(at, self.before, 0)
            whole = tf.fill(sizes, neutral)
            return tensorflow_xla.replaced(whole, summable, begins)
        after = self.total - self.before - self.length
        return tf.pad(
            summable, self._along(self.before, after), constant_values=neutral
        )

    def own(self, gathered: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of a tensor like `all`."""
        mine = self._resized(gathered, self.before, self.length)
        missing = tf.shape(self._source)[self._axis] - self.length
        padded = tf.pad(mine, self._along(0, missing))
        return tf.ensure_shape(padded, self._source.shape)

    def _resized(self, tensor: tf.Tensor, begin: Any, length: Any) -> tf.Tensor:
        rows = _range_of(tensor, self._axis, begin, length)
        sizes = tensor.shape.as_list()
        sizes[self._axis] = None
        return tf.ensure_shape(rows, sizes)

    def _along(self, before: Any, after: Any) -> tf.Tensor:
        at = _is_axis(self._source, self._axis)
        return tf.where(at[:, tf.newaxis], [[before, after]], 0)


def _range_of(tensor: tf.Tensor, axis: int, begin: Any, length: Any) -> Any:
    """Returns some entries of a tensor along an axis."""
    at = _is_axis(tensor, axis)
    sizes = tf.where(at, length, tf.shape(tensor))
    return tf.slice(tensor, tf.where(at, begin, 0), sizes)


def _is_axis(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    return tf.range(tf.rank(tensor)) == axis


class GatheredRows:
    """The rows of a tensor of all replicas, in the order of the samples."""

    def __init__(self, source: tf.Tensor, kind: Kind) -> None:
        self._shape = source.shape
        self._axis = kind.axis
        parts = split_blocks(source, kind)
        self.blocks = [_GatheredBlock(part, self._axis) for part in parts]
        self.all = source

    def complete(self) -> None:
        """Joins the blocks, each of which all replicas have gathered."""
        parts = [block.all for block in self.blocks]
        self.all = tf.concat(parts, self._axis) if len(parts) > 1 else parts[0]

    def own(self, gathered: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of a tensor like `all`."""
        if len(self.blocks) == 1:
            return self.blocks[0].own(gathered)
        lengths = [block.total for block in self.blocks]
        parts = tf.split(gathered, lengths, self._axis)
        mine = [x.own(y) for x, y in zip(self.blocks, parts, strict=True)]
        return tf.ensure_shape(tf.concat(mine, self._axis), self._shape)


def gathered(sources: list[tf.Tensor], step: Step) -> list[GatheredRows]:
    """Returns the rows of all replicas, gathered once in a graph."""
    known = _Gathered.of(step).rows
    here = tf.compat.v1.get_default_graph()
    new = [
        source
        for source in sources
        if id(source) not in known or known[id(source)].all.graph is not here
    ]
    known |= zip(map(id, new), _gathered_now(new, step), strict=True)
    return [known[id(source)] for source in sources]


class _Gathered(Part):
    """The rows that have been gathered in a step."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.rows: dict[int, GatheredRows] = {}
        """By the ids of tensors, the rows of all replicas."""


def _gathered_now(sources: list[tf.Tensor], step: Step) -> list[GatheredRows]:
    if not sources:
        return []
    pairs = [(source, step.kinds.of(source)) for source in sources]
    found = [GatheredRows(*pair) for pair in pairs]
    blocks_of_all = [block for rows in found for block in rows.blocks]
    names = [repr(x.op.name) for x, kind in pairs if not kind.regular]
    if step.in_xla and names:
        raise error_texts.cannot_compile(
            "XLA has to know how many rows replicas exchange. Here only values "
            f"tell, as in {', '.join(names)}."
        )
    _find_places(blocks_of_all, step)
    placed = [block.placed(step.in_xla) for block in blocks_of_all]
    total = replica_collectives().all_reduce("sum", placed)
    for block, one in zip(blocks_of_all, total, strict=True):
        block.all = tf.cast(one, block.all.dtype)
    for rows in found:
        rows.complete()
    return found


def own_part(whole: tf.Tensor, like: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns this replica's rows of all replicas' rows.

    There are as many for each sample. `like` only tells the result's shape.
    """
    place = step.place()
    own, before, total = (tf.cast(number, tf.int32) for number in place)
    count = tf.shape(whole)[0]
    length = count // total * own
    # A stand-in for missing samples has any rows.
    begin = tf.minimum(count // total * before, count - length)
    return tf.ensure_shape(_range_of(whole, 0, begin, length), like.shape)


def _find_places(found: list[_GatheredBlock], step: Step) -> None:
    """Sets the places of the blocks' rows among the rows of all replicas."""
    if not step.in_xla:
        _exchange_lengths(found, step)
        return
    # Where shards are even, XLA can know all sizes.
    for block in found:
        with tensorflow_tracing.of_rank():
            block.before = replica_rank() * block.length
        block.total = replica_collectives().count * block.length


def _exchange_lengths(found: list[_GatheredBlock], step: Step) -> None:
    """Tells each block how many rows the other replicas have of it."""
    has_samples = step.batch_fraction > 0
    for block in found:
        block.length = tf.where(has_samples, block.length, 0)
    lengths = tf.stack([[block.length for block in found]])
    each = replica_collectives().all_gather([lengths], 0)[0]
    with tensorflow_tracing.of_rank():
        earlier = each[: replica_rank()]
    before = tf.unstack(tf.reduce_sum(earlier, 0), len(found))
    total = tf.unstack(tf.reduce_sum(each, 0), len(found))
    for block, *sizes in zip(found, before, total, strict=True):
        block.before, block.total = sizes
