"""A sample for a process that has had none of its own to run on."""

from typing import Any

import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import broadcast_bytes
from keras_conflux._cluster.processes import process_index
from keras_conflux._data import rows
from keras_conflux._fit.input.batches import Batch


def given_by(root: int, own: Batch | None, name: str) -> list[Any]:
    """Returns the leaves of a batch of one sample of another process.

    All processes call it together.

    Args:
        root: The process that gives it.
        own: Its batch. That of others does not count.
        name: Whose batch it is, as messages say it.
    """
    tensors: list[Any] = []
    spec: list[Any] = []
    if process_index() == root and own is not None:
        leaves = _of_one_sample(own.shards[0])
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        spec = [_spec_in_words(leaf) for leaf in leaves]
    texts = [tf.io.serialize_tensor(tensor).numpy() for tensor in tensors]
    told = all_gather_json(
        f"a sample of {name}",
        [spec, [x.dtype.name for x in tensors], list(map(len, texts))],
    )
    spec, dtypes, lengths = told[root]
    whole = broadcast_bytes(root, b"".join(texts), sum(lengths))
    tensors = []
    with tf.device("CPU:0"):
        for dtype, length in zip(dtypes, lengths, strict=True):
            tensors.append(tf.io.parse_tensor(whole[:length], dtype))
            whole = whole[length:]
    return tf.nest.pack_sequence_as(
        [_spec_of_words(*each) for each in spec],
        tensors,
        expand_composites=True,
    )


def _of_one_sample(leaves: list[Any]) -> list[Any]:
    lengths = {int(rows.length_of(x)) for x in leaves if x.shape.rank}
    if len(lengths) > 1:  # what they have to do with each other is not known
        return leaves
    return [rows.take(x, 0, 1) if x.shape.rank else x for x in leaves]


def _spec_in_words(leaf: Any) -> list[Any]:
    ragged = leaf.ragged_rank if isinstance(leaf, tf.RaggedTensor) else 0
    return [
        type(leaf).__name__,
        leaf.dtype.name,
        tf.TensorShape(
            [None, *leaf.shape[1:]] if leaf.shape.rank else []
        ).as_list(),
        ragged,
    ]


def _spec_of_words(kind: str, dtype: str, shape: list[Any], ragged: int) -> Any:
    if kind == "RaggedTensor":
        return tf.RaggedTensorSpec(shape, tf.as_dtype(dtype), ragged)
    of_kind = tf.SparseTensorSpec if kind == "SparseTensor" else tf.TensorSpec
    return of_kind(shape, tf.as_dtype(dtype))
