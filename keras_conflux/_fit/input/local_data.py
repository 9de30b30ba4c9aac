"""The exchange of processes about data of which each brings a part."""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import broadcast_bytes
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_iterators
from keras_conflux._fit.input import specs
from keras_conflux._fit.input.device_batches import Batch


def listed(told: list[Any]) -> str:
    """Returns a list of each process' data, in words."""
    return "; ".join(
        f"process {index}: {each or 'nothing'}"
        for index, each in enumerate(told)
    )


def agree_on_specs(iterator: Any, name: str) -> Tree:
    """Makes an epoch iterator last as long as any process' does.

    Args:
        iterator: Keras' epoch iterator over this process' part.
        name: The call whose data they are, in messages.

    Returns:
        The `tf.TypeSpec`s that the batches of all processes fit.

    Raises:
        ReplicaMismatchError: If the parts cannot be joined to one batch.
    """
    spec = keras_iterators.batch_spec(iterator)
    leaves = [_in_words(x) for x in trees.flatten(spec)]
    steps = iterator.steps_per_epoch, iterator.steps_per_execution
    told = all_gather_json(
        f"the data of {name}",
        [iterator.data_adapter.num_batches, steps, trees.paths(spec), leaves],
    )
    numbers, asked, paths, words = zip(*told, strict=True)
    if any(each != asked[0] for each in asked):
        texts = [
            f"steps_per_epoch={steps}, steps_per_execution={several}"
            for steps, several in asked
        ]
        raise ReplicaMismatchError(
            f"{name}: the processes are to run different numbers of steps: "
            f"{listed(texts)}. Give all the same; one whose data end earlier "
            "goes on without."
        )
    known = all(number is not None for number in numbers)
    keras_iterators.set_number_of_batches(
        iterator, max(numbers) if known else None
    )
    if any(each != paths[0] for each in paths) or not _can_be_joined(words):
        texts = [
            ", ".join(
                f"{p}: {_described(x)}" for p, x in zip(*each, strict=True)
            )
            for each in zip(paths, words, strict=True)
        ]
        raise ReplicaMismatchError(
            f"{name}: the data of the processes differ in more than their "
            f"number of samples: {listed(texts)}. Together they are one batch: "
            "give all the same structure, dtypes and shapes."
        )
    shapes = [_common_shape(each) for each in zip(*words, strict=True)]
    flat = [
        None if leaf is None else specs.with_shape(leaf, shape)
        for leaf, shape in zip(trees.flatten(spec), shapes, strict=True)
    ]
    return keras.tree.pack_sequence_as(spec, flat)


def sample_of_process(root: int, own: Batch | None, name: str) -> list[Any]:
    """Returns the leaves of a batch of one sample of another process.

    One that has had no samples of its own runs on it.
    All processes call it together.

    Args:
        root: The process that gives it.
        own: Its batch. Other processes' do not count.
        name: The call whose batch it is, in messages.
    """
    tensors: list[Any] = []
    words: list[Any] = []
    if process_index() == root and own is not None:
        leaves = _of_one_sample(own.shards[0])
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        words = [_in_words(each) for each in map(specs.spec_of_any, leaves)]
    texts = [tf.io.serialize_tensor(tensor).numpy() for tensor in tensors]
    told = all_gather_json(
        f"a sample of {name}",
        [words, [x.dtype.name for x in tensors], list(map(len, texts))],
    )
    words, dtypes, lengths = told[root]
    whole = broadcast_bytes(root, b"".join(texts), sum(lengths))
    tensors = []
    with tf.device("CPU:0"):
        for dtype, length in zip(dtypes, lengths, strict=True):
            tensors.append(tf.io.parse_tensor(whole[:length], dtype))
            whole = whole[length:]
    return tf.nest.pack_sequence_as(
        [_spec_of(*each) for each in words],
        tensors,
        expand_composites=True,
    )


def _of_one_sample(leaves: list[Any]) -> list[Any]:
    lengths = {int(rows.length_of(x)) for x in leaves if x.shape.rank}
    if len(lengths) > 1:  # their relation to each other is unknown
        return leaves
    return [rows.take(x, 0, 1) if x.shape.rank else x for x in leaves]


def _in_words(spec: Any) -> list[Any] | None:
    """Returns the type and the shape of a spec's values."""
    if spec is None:
        return None
    kind = type(spec).__name__.removesuffix("Spec")
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return [kind, spec.dtype.name, getattr(spec, "ragged_rank", 0), shape]


def _described(leaf: list[Any] | None) -> str:
    if leaf is None:
        return "None"
    kind, dtype, _, shape = leaf
    if shape is None:
        return f"{kind} {dtype} of unknown rank"
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f"{kind} {dtype}({sizes})"


def _can_be_joined(words: tuple[list[Any], ...]) -> bool:
    """Whether the leaves of all processes may be of one batch."""
    for same in zip(*words, strict=True):
        if any((leaf is None) != (same[0] is None) for leaf in same):
            return False
        if same[0] is None:
            continue
        if any(leaf[:3] != same[0][:3] for leaf in same):
            return False
        shapes = [leaf[3] for leaf in same if leaf[3] is not None]
        if len({len(shape) for shape in shapes}) > 1:
            return False
        for sizes in list(zip(*shapes, strict=True))[1:]:
            if len(set(sizes) - {None}) > 1:
                return False
    return True


def _common_shape(leaves: tuple[Any, ...]) -> list[int | None] | None:
    """Returns the shape of all, without the sizes that not all say alike."""
    shapes = [leaf and leaf[3] for leaf in leaves]
    if any(shape is None for shape in shapes):
        return None
    return [
        sizes[0] if len(set(sizes)) == 1 else None
        for sizes in zip(*shapes, strict=True)
    ]


def _spec_of(kind: str, dtype: str, ragged_rank: int, shape: Any) -> Any:
    """Returns the spec that `_in_words` has told."""
    if kind == "RaggedTensor":
        return tf.RaggedTensorSpec(shape, tf.as_dtype(dtype), ragged_rank)
    of_kind = tf.SparseTensorSpec if kind == "SparseTensor" else tf.TensorSpec
    return of_kind(shape, tf.as_dtype(dtype))
