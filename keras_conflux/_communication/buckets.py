"""Many small tensors in few flat ones, and back."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf

from keras_conflux._common.trees import bytes_of
from keras_conflux._common.trees import size_of

T = TypeVar("T")

BUCKET_BYTES = 32 << 20
"""A bucket is reduced as soon as it is full, while later ones are computed."""

MAX_IN_ORDER = 4
"""About as many buckets wait for each other. XLA computes the gradients of a
bucket right before its reduction, so many small ones hide no more than few, and
cost more (docs/log.md)."""


def plan(
    tensors: Sequence[tf.Tensor], bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """Groups tensors by dtype into buckets; returns the tensors' positions.

    Gradients become known from the last layer to the first, so the last tensors
    go into the first bucket. A tensor of unknown size counts as empty.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for position in reversed(range(len(tensors))):
        tensor = tensors[position]
        bucket, used = open_buckets.get(tensor.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(position)
        used += bytes_of(tensor)
        open_buckets[tensor.dtype] = (
            ([], 0) if used >= bucket_bytes else (bucket, used)
        )
    return buckets


def neighbours(
    items: Iterable[T], size_of: Callable[[T], int], limit: int
) -> Iterator[list[T]]:
    """Groups neighbours within a limit, which one item may exceed."""
    group: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


def map_buckets(
    function: Callable[[tf.Tensor], tf.Tensor],
    tensors: Sequence[tf.Tensor],
    bucket_bytes: int = BUCKET_BYTES,
    in_order: bool = False,
) -> list[tf.Tensor]:
    """Applies an elementwise `function` to dense tensors, bucket by bucket.

    If `in_order`, an element of each one's result travels with the next one.
    """
    if in_order:
        total = sum(map(bytes_of, tensors))
        bucket_bytes = max(bucket_bytes, total // MAX_IN_ORDER)
    results: list[tf.Tensor] = list(tensors)
    before = None
    for bucket in plan(tensors, bucket_bytes):
        parts = [tensors[position] for position in bucket]
        flat = [tf.reshape(part, [-1]) for part in parts]
        if in_order and before is not None:
            flat.append(tf.cast(before[:1], parts[0].dtype))
        if len(flat) == 1:
            results[bucket[0]] = function(parts[0])
            before = tf.reshape(results[bucket[0]], [-1])
            continue
        before = function(tf.concat(flat, 0))
        sizes = [size_of(part) for part in flat]
        pieces = tf.split(before, sizes, num=len(flat))
        for position, part, piece in zip(bucket, parts, pieces, strict=False):
            results[position] = tf.reshape(piece, tf.shape(part))
    return results
