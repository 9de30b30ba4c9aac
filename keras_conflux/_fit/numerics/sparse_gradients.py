"""Sums sparse gradients, whose rows repeat as often as on one device."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import sources_of_entries
from keras_conflux._graphs import walks
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import has_samples
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step

_DISTINCT = {
    "Unique": 0,
    "UniqueV2": 0,
    "UniqueWithCounts": 0,
    "UniqueWithCountsV2": 0,
    "SparseSegmentSumGradV2": 1,
    "SparseSegmentMeanGradV2": 1,
    "SparseSegmentSqrtNGradV2": 1,
}
"""Which output of an operation has each number once."""


@dataclasses.dataclass
class _Part:
    """Rows of a gradient that were looked up together, or a dense one."""

    rows: Any
    is_equal: bool = False
    """Whether all replicas have looked the same rows up."""
    keys: tf.Tensor | None = None
    """A number for each row, if one device has each number once."""

    @property
    def share(self) -> Any:
        """The summand of a replica, or `tf.IndexedSlices` to join."""
        return self.rows.values if self.is_equal else self.rows

    def total(self, share: Any, keys: Iterator[tf.Tensor]) -> Any:
        """Returns what one device has, from the sum of the shares."""
        if self.is_equal:
            rows = self.rows
            return tf.IndexedSlices(share, rows.indices, rows.dense_shape)
        return share if self.keys is None else each_once(share, next(keys))


def summed(grads: list[Any], sources: list[Any], step: Step) -> list[Any]:
    """Sums gradients, some of which may be sparse.

    Optimizers square, and clip, each row of a sparse gradient for itself. A row
    that one device looks up once, as a position's, occurs once in the sum.
    """
    this, present = replica_collectives(), has_samples()
    if tf.executing_eagerly() or this.count == 1:
        return this.weighted_sum(grads, present)
    parts = [
        list(_parts(grad, source, step))
        if isinstance(grad, tf.IndexedSlices)
        else [_Part(grad)]
        for grad, source in zip(grads, sources, strict=True)
    ]
    every = [*itertools.chain(*parts)]
    summands = [part.share for part in every]
    shares = iter(this.weighted_sum(summands, present))
    keys = iter(_all_keys(every))
    return [
        _joined([part.total(next(shares), keys) for part in own])
        for own in parts
    ]


def each_once(
    slices: tf.IndexedSlices, keys: tf.Tensor | None = None
) -> tf.IndexedSlices:
    """Adds up the rows that have the same key, by default the same index."""
    indices = slices.indices
    found, places = tf.unique(indices if keys is None else keys)
    # On CPU devices, one thread adds up all parts of a row, in their order.
    count = tf.size(found)
    values = tf.math.unsorted_segment_sum(slices.values, places, count)
    if keys is not None:
        found = tf.math.unsorted_segment_max(indices, places, count)
    return tf.IndexedSlices(values, found, slices.dense_shape)


def _all_keys(parts: list[_Part]) -> list[tf.Tensor]:
    keys = [part.keys for part in parts if part.keys is not None]
    return replica_collectives().all_gather(keys, 0) if keys else []


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], 0),
        tf.concat([part.indices for part in parts], 0),
        parts[0].dense_shape,
    )


def _parts(rows: tf.IndexedSlices, source: Any, step: Step) -> Iterator[_Part]:
    """Divides a gradient by the lookups that its rows come from."""
    origins = list(_origins(rows.indices, step))
    sizes = [tf.size(origin) for origin in origins]
    for origin, values, indices in zip(
        origins,
        _split(rows.values, sizes),
        _split(rows.indices, sizes),
        strict=True,
    ):
        rows = tf.IndexedSlices(values, indices, rows.dense_shape)
        if _is_equal(origin, step):
            shape = [origin.shape.num_elements(), *values.shape[1:]]
            rows = tf.IndexedSlices(
                tf.ensure_shape(values, shape), indices, rows.dense_shape
            )
            yield _Part(rows, is_equal=True)
        elif _DISTINCT.get(origin.op.type) == origin.value_index:
            yield _Part(rows, keys=tf.reshape(origin, [-1]))
        else:
            _warn_if_distinct(origin, source, step)
            yield _Part(rows)


def _split(tensor: tf.Tensor, sizes: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tensor] if len(sizes) == 1 else tf.split(tensor, sizes)


def _origins(indices: tf.Tensor, step: Step) -> Iterator[tf.Tensor]:
    """Yields the tensors of which indices were joined, as far as is seen.

    One after the other, their entries are those of which the indices are made.
    """
    origin = _origin(indices, step)
    joined = _joined_in(origin)
    if _is_equal(origin, step) or not joined:
        yield origin
    else:
        for each in joined:
            yield from _origins(each, step)


def _origin(tensor: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns the tensor of whose entries another's are made, in their places.

    Besides, they are made of numbers that are equal on all replicas.
    """
    if _is_equal(tensor, step):
        return tensor

    def behind(each: tf.Tensor) -> list[tf.Tensor]:
        found = sources_of_entries(each.op)
        return [x for x in found if x.shape.rank != 0 or not _is_equal(x, step)]

    walked = walks.walked([tensor], behind)
    ends = [x for x in walked if not sources_of_entries(x.op)]
    return ends[0] if len(ends) == 1 else tensor


def _joined_in(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that were joined along the first axis."""
    operation = tensor.op
    if operation.type == "ConcatV2":
        *parts, axis = operation.inputs
        return parts if tf.get_static_value(axis) == 0 else []
    if operation.type == "Pack" and operation.get_attr("axis") == 0:
        return list(operation.inputs)
    return []


def _is_equal(tensor: tf.Tensor, step: Step) -> bool:
    if step.kinds.is_blind:
        return walks.is_constant(tensor)
    return step.kinds.of(tensor) == EQUAL


def _warn_if_distinct(origin: tf.Tensor, source: Any, step: Step) -> None:
    graph = origin.graph
    distinct = [op for op in graph.get_operations() if op.type in _DISTINCT]
    if not distinct or not walks.depends_on([origin.op], distinct):
        return
    name = state.name_of(source)
    step.warn_once(
        f"distinct rows of {name}",
        f"rows of {name} are looked up by indices computed from `tf.unique`, "
        "in a way that does not show which rows one device would look up once. "
        "Each replica looks them up once, so optimizers that square gradients, "
        "or clip them, see a row once per replica. Look the rows up by the "
        "result of `tf.unique`, and take the rows of the samples from there.",
        origin.op,
    )
