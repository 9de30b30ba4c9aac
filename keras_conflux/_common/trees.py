"""Trees of tensors: their leaves with paths, and whether two are alike."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import TypeAlias

import keras
import tensorflow as tf

from keras_conflux._common.errors import ReplicaMismatchError

Tree: TypeAlias = Any
"""Nested dicts, lists and tuples, as `keras.tree` knows them, with leaves."""

Leaf: TypeAlias = Any
"""A tensor, array, number, variable or `tf.IndexedSlices`; or `None`."""

flatten = keras.tree.flatten


def map_leaves(function: Callable[[Leaf], Any], tree: Tree) -> Tree:
    """Applies `function` to each leaf that is not `None`."""
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), tree
    )


def present(tree: Tree) -> list[Leaf]:
    """Returns the leaves that are not `None`."""
    return [leaf for leaf in flatten(tree) if leaf is not None]


def refill(tree: Tree, leaves: Iterable[Leaf]) -> Tree:
    """Puts other leaves in place of those that are not `None`."""
    replacements = iter(leaves)
    return map_leaves(lambda _: next(replacements), tree)


def paths(tree: Tree) -> list[str]:
    """Returns one path per leaf, in the order of `flatten`: `['kernel'][0]`."""
    return [
        "".join(f"[{key!r}]" for key in path) or "the value"
        for path, _ in keras.tree.flatten_with_path(tree)
    ]


def with_paths(tree: Tree) -> list[tuple[str, Leaf]]:
    """Returns each leaf behind its path, in the order of `flatten`."""
    return list(zip(paths(tree), flatten(tree), strict=True))


def length(flat: tf.Tensor) -> int:
    """Returns the number of entries of a leaf of one axis."""
    found = flat.shape[0]
    assert found is not None, "parts are of known sizes"
    return found


def size_of(tensor: tf.Tensor) -> Any:
    """Returns the number of entries, a number of Python if it is known."""
    size = tensor.shape.num_elements()
    return tf.size(tensor) if size is None else size


def bytes_of(leaf: Leaf) -> int:
    """Returns the bytes of a tensor or variable, 0 if its size is not known."""
    size = tf.TensorShape(leaf.shape).num_elements() or 0
    return size * tf.as_dtype(leaf.dtype).size


def describe(leaf: Leaf) -> str:
    """Returns a leaf's shape and dtype in words, such as `float32(3, 4)`."""
    if leaf is None:
        return "None"
    if isinstance(leaf, tf.IndexedSlices):
        return f"IndexedSlices of {leaf.dtype.name}"
    shape = tf.TensorShape(leaf.shape)
    if shape.rank is None:
        return f"{tf.as_dtype(leaf.dtype).name} of unknown rank"
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f"{tf.as_dtype(leaf.dtype).name}({sizes})"


def assert_alike(trees: Mapping[int, Tree], what: str) -> None:
    """Raises unless all trees have the same paths, dtypes and shapes.

    Unknown dimensions agree with any. The error names the first other leaf.
    """
    first = dict(with_paths(trees[0]))
    for index, tree in trees.items():
        other = dict(with_paths(tree))
        for path in (*first, *other):
            if path not in first or path not in other:
                has, lacks = (0, index) if path in first else (index, 0)
                raise ReplicaMismatchError(
                    f"{what}: replica {has} has a leaf at {path}, replica "
                    f"{lacks} has none there. Give every replica the same "
                    "structure."
                )
        for path, leaf in first.items():
            if not _leaves_alike(leaf, other[path]):
                raise ReplicaMismatchError(
                    f"{what}: for {path} replica 0 has {describe(leaf)}, "
                    f"replica {index} has {describe(other[path])}. "
                    f"{_advice(leaf, other[path])}"
                )


def _advice(one: Leaf, other: Leaf) -> str:
    if one is None or other is None:
        return (
            "A gradient is None where its variable is unused: put "
            "`tf.zeros_like(variable)` there, or reduce without it."
        )
    return (
        "Shapes and dtypes must agree. `allgather` takes sizes that differ "
        "along its axis."
    )


def _leaves_alike(one: Leaf, other: Leaf) -> bool:
    if one is None or other is None:
        return one is other
    is_sparse = isinstance(one, tf.IndexedSlices)
    if is_sparse != isinstance(other, tf.IndexedSlices):
        return False
    if tf.as_dtype(one.dtype) != tf.as_dtype(other.dtype):
        return False
    return is_sparse or tf.TensorShape(one.shape).is_compatible_with(
        tf.TensorShape(other.shape)
    )
