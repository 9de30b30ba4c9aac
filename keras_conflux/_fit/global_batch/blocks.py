"""Takes apart tensors of rows that were joined to one."""

from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._fit.global_batch.kinds import Block
from keras_conflux._fit.global_batch.kinds import Kind


def split_blocks(tensor: tf.Tensor, kind: Kind) -> list[tf.Tensor]:
    """Returns the blocks of a tensor, one after the other.

    Args:
        tensor: Rows of a replica, or of all.
        kind: What they are: ROWS along an axis that is known.
    """
    if kind.blocks == 1:
        return [tensor]
    total = _length(tensor, kind.axis)
    lengths = _lengths(kind.joined, kind.blocks, total)
    return tf.split(tensor, lengths, kind.axis)


def _lengths(joined: tuple[Block, ...], blocks: int, total: Any) -> list[Any]:
    """Returns how long blocks are that are `total` rows together."""
    if not all(tensorflow_graphs.is_reachable(each.tensor) for each in joined):
        joined = ()
    if not joined:
        return [total // blocks] * blocks
    lengths = [_length(each.tensor, each.axis) for each in joined]
    whole = sum(lengths)
    found = []
    for each, length in zip(joined, lengths, strict=True):
        # Products of two lengths need more than 32 bits.
        share = _wide(length) * _wide(total) // _wide(whole)
        found.extend(_lengths(each.joined, each.blocks, share))
    return found


def _length(tensor: tf.Tensor, axis: int) -> Any:
    known = tensor.shape[axis]
    return tf.shape(tensor)[axis] if known is None else known


def _wide(length: Any) -> Any:
    return length if isinstance(length, int) else tf.cast(length, tf.int64)
