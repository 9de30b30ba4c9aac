"""What processes agree on of data of which each brings its own part."""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_iterators
from keras_conflux._fit.input.local_batches import listed


def agree_on(iterator: Any, name: str) -> Tree:
    """Makes an epoch iterator last as long as that of any process.

    Args:
        iterator: Keras' epoch iterator over this process' part.
        name: Whose data they are, as messages say it.

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
    numbers, asked, paths, specs = zip(*told, strict=True)
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
    if any(each != paths[0] for each in paths) or not _fit(specs):
        texts = [
            ", ".join(
                f"{p}: {_described(x)}" for p, x in zip(*each, strict=True)
            )
            for each in zip(paths, specs, strict=True)
        ]
        raise ReplicaMismatchError(
            f"{name}: the data of the processes differ in more than their "
            f"number of samples: {listed(texts)}. Together they are one batch: "
            "give all the same structure, dtypes and shapes."
        )
    shapes = [_common_shape(each) for each in zip(*specs, strict=True)]
    flat = [
        None if leaf is None else _of_shape(leaf, shape)
        for leaf, shape in zip(trees.flatten(spec), shapes, strict=True)
    ]
    return keras.tree.pack_sequence_as(spec, flat)


def _in_words(spec: Any) -> list[Any] | None:
    """Returns what kind of values a spec is of, and their shape."""
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


def _fit(specs: tuple[list[Any], ...]) -> bool:
    """Whether the leaves of all processes may be of one batch."""
    for same in zip(*specs, strict=True):
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


def _of_shape(spec: Any, shape: list[int | None] | None) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)
