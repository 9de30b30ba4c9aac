"""Computes what one device would have, from what the replicas have.

What is a sum or a mean over samples is reduced. What was computed from such
reductions, or by comparing samples with each other, is computed once more from
the reduced, or gathered, values: a copy of the few operations between them and
the result is put into the graph.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._communication import dtypes
from keras_conflux._compat import error_texts
from keras_conflux._fit.global_batch import strings
from keras_conflux._fit.global_batch.derivation import derivation
from keras_conflux._fit.global_batch.kinds import COUNTED
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import replica_rank


def global_values(
    tensors: list[tf.Tensor], context: StepContext
) -> list[tf.Tensor]:
    """Returns what one device would have for tensors of a replica.

    Args:
        tensors: Traced, and not OPAQUE.
        context: Of the step.

    Raises:
        CannotTell: If one of them cannot be computed.
    """
    derivations = [derivation(tensor, context) for tensor in tensors]
    known = of_sources(
        {key: x for each in derivations for key, x in each.sources.items()},
        context,
    )
    results = [each.recomputed(known) for each in derivations]
    context.kinds.mark_equal(results)
    return results


def of_sources(
    sources: dict[int, tf.Tensor], context: StepContext
) -> dict[int, tf.Tensor]:
    """Returns the global values of tensors whose kinds are known, by id.

    What is reduced in the same way is reduced in one call.
    """
    fraction = context.batch_fraction
    collectives = replica_collectives()
    kinds = {key: context.kinds.of(x) for key, x in sources.items()}
    values: dict[int, tf.Tensor] = {}

    def put(roles: tuple[Role, ...], reduce: Callable) -> None:
        keys = [key for key, kind in kinds.items() if kind.role in roles]
        if not keys:
            return
        reduced = reduce([sources[key] for key in keys])
        values.update(zip(keys, reduced, strict=True))

    def total(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        mine = [
            x
            if context.kinds.of(x) == COUNTED
            else tf.where(fraction > 0, x, tf.zeros_like(x))
            for x in tensors
        ]
        return collectives.all_reduce("sum", mine)

    def gather(rows: list[tf.Tensor]) -> list[tf.Tensor]:
        numbers = [_as_numbers(each, context) for each in rows]
        return [
            strings.decoded(found.all) if each.dtype == tf.string else found.all
            for each, found in zip(
                rows, gathered(numbers, context), strict=True
            )
        ]

    def counts(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if context.in_xla:  # shards are even, and XLA has to know shapes
            return [tensor * collectives.count for tensor in tensors]
        return total(tensors)

    put((Role.EQUAL,), list)
    put((Role.RANDOM,), lambda drawn: collectives.broadcast(drawn, 0))
    put((Role.TOTAL,), total)
    put((Role.COUNT,), counts)
    put((Role.MEAN,), lambda means: collectives.weighted_sum(means, fraction))
    put((Role.ROWS,), gather)
    for key, kind in kinds.items():
        if kind.role is Role.SHAPE:
            at = tf.range(tf.size(sources[key])) == kind.axis
            values[key] = tf.where(at, counts([sources[key]])[0], sources[key])
    return values


def _as_numbers(rows: tf.Tensor, context: StepContext) -> tf.Tensor:
    if rows.dtype != tf.string:
        return rows
    codes = strings.encoded(rows)
    context.kinds.mark(codes, context.kinds.of(rows))
    return codes


class GatheredRows:
    """The rows of a tensor of all replicas, in the order of the samples.

    A replica without samples, which runs on a stand-in, adds none.

    Args:
        source: The replica's tensor.
        kind: What it is: ROWS along an axis that is known.
    """

    def __init__(self, source: tf.Tensor, kind: Kind) -> None:
        self._shape = source.shape
        self._blocks = kind.blocks
        self._axis = (kind.axis or 0) + (kind.blocks > 1)
        self._source = self._apart(source)
        self._before: Any = 0
        self.length: Any = tf.shape(self._source)[self._axis]
        self.all = source

    def placed(self, before: Any, after: Any) -> tf.Tensor:
        """Returns this replica's rows where all will have them.

        Args:
            before: How many rows the replicas before this one have.
            after: How many rows the replicas behind this one have.
        """
        self._before = before
        mine = self._resized(self._source, 0, self.length)
        summable = dtypes.as_summable(mine)
        return tf.pad(
            summable,
            self._along(before, after),
            constant_values=dtypes.sum_identity(summable),
        )

    def complete(self, placed: tf.Tensor) -> None:
        """Takes the sum of all replicas' rows where all will have them."""
        self.all = self._together(tf.cast(placed, self._source.dtype))

    def own(self, gathered: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of a tensor like `all`."""
        everywhere = self._apart(gathered)
        mine = self._resized(everywhere, self._before, self.length)
        missing = tf.shape(self._source)[self._axis] - self.length
        padded = tf.pad(mine, self._along(0, missing))
        return tf.ensure_shape(self._together(padded), self._shape)

    def _apart(self, tensor: tf.Tensor) -> tf.Tensor:
        """Puts blocks along an axis of their own, before that of the rows."""
        if self._blocks == 1:
            return tensor
        at = self._axis - 1
        sizes, known = tf.shape(tensor), tensor.shape.as_list()
        length = None if (n := known[at]) is None else n // self._blocks
        each = [self._blocks, sizes[at] // self._blocks]
        parts = tf.reshape(
            tensor, tf.concat([sizes[:at], each, sizes[at + 1 :]], 0)
        )
        known[at : at + 1] = [self._blocks, length]
        return tf.ensure_shape(parts, known)

    def _together(self, tensor: tf.Tensor) -> tf.Tensor:
        if self._blocks == 1:
            return tensor
        at = self._axis - 1
        sizes, known = tf.shape(tensor), tensor.shape.as_list()
        joined = tf.concat([sizes[:at], [-1], sizes[at + 2 :]], 0)
        known[at : at + 2] = [None]
        return tf.ensure_shape(tf.reshape(tensor, joined), known)

    def _resized(self, tensor: tf.Tensor, begin: Any, length: Any) -> tf.Tensor:
        others = tf.range(tf.rank(tensor)) != self._axis
        starts = tf.where(others, 0, begin)
        rows = tf.slice(
            tensor, starts, tf.where(others, tf.shape(tensor), length)
        )
        sizes = tensor.shape.as_list()
        sizes[self._axis] = None
        return tf.ensure_shape(rows, sizes)

    def _along(self, before: Any, after: Any) -> tf.Tensor:
        rank = self._source.shape.rank
        at = tf.reshape(tf.range(rank) == self._axis, [rank, 1])
        return tf.where(at, [[before, after]], 0)


def gathered(
    sources: list[tf.Tensor], context: StepContext
) -> list[GatheredRows]:
    """Returns the rows of all replicas, gathered once in a graph.

    Args:
        sources: Of the role ROWS, along axes that are known.
        context: Of the step.
    """
    here = tf.compat.v1.get_default_graph()
    new = [
        source
        for source in sources
        if id(source) not in context.gathered
        or context.gathered[id(source)].all.graph is not here
    ]
    for source, rows in zip(new, _gathered_now(new, context), strict=True):
        context.gathered[id(source)] = rows
    return [context.gathered[id(source)] for source in sources]


def _names(sources: list[tf.Tensor], kinds: list[Kind]) -> str:
    """Returns the names of rows of which samples have different numbers."""
    return ", ".join(
        repr(source.op.name)
        for source, kind in zip(sources, kinds, strict=True)
        if not kind.regular
    )


def _gathered_now(
    sources: list[tf.Tensor], context: StepContext
) -> list[GatheredRows]:
    if not sources:
        return []
    kinds = [context.kinds.of(source) for source in sources]
    found = [
        GatheredRows(source, kind)
        for source, kind in zip(sources, kinds, strict=True)
    ]
    collectives = replica_collectives()
    index = replica_rank()
    if context.in_xla and all(kind.regular for kind in kinds):
        # Where shards are even, XLA can know all sizes.
        before = [index * rows.length for rows in found]
        after = [
            (collectives.count - 1 - index) * rows.length for rows in found
        ]
    elif context.in_xla and collectives.count > 1:
        raise error_texts.cannot_compile(
            "XLA has to know how many rows replicas exchange. Here only values "
            f"tell, as in {_names(sources, kinds)}.",
        )
    else:
        has_samples = context.batch_fraction > 0
        for rows in found:
            rows.length = tf.where(has_samples, rows.length, 0)
        lengths = tf.stack([[rows.length for rows in found]])
        each = collectives.all_gather([lengths], 0)[0]
        before = tf.unstack(tf.reduce_sum(each[:index], 0), len(sources))
        after = tf.unstack(tf.reduce_sum(each[index + 1 :], 0), len(sources))
    placed = [
        rows.placed(*sizes)
        for rows, *sizes in zip(found, before, after, strict=True)
    ]
    total = collectives.all_reduce("sum", placed)
    for rows, one in zip(found, total, strict=True):
        rows.complete(one)
    return found
