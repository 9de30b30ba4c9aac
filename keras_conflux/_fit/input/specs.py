"""The `tf.TypeSpec`s of the data for which a step is traced."""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree


class Specs:
    """Finds the specs that a step is traced for, the same for many batches.

    With `keep_rows` they say how many samples a batch has, if a step must know.
    """

    def __init__(self, keep_rows: bool = False) -> None:
        self._keep_rows = keep_rows
        self._seen: dict[str, Tree] = {}

    def __call__(self, batch: Tree, declared: Tree = None) -> Tree:
        """Returns specs that fit a batch: declared ones, if there are any."""
        specs = self._of_any_rows(batch, declared)
        return _with_rows(specs, batch) if self._keep_rows else specs

    def _of_any_rows(self, batch: Tree, declared: Tree) -> Tree:
        if declared is not None:
            specs = keras.tree.map_structure(
                lambda x, spec: None if x is None else spec, batch, declared
            )
            if all(s.shape.rank is not None for s in trees.present(specs)):
                return specs
        return self._common(batch)

    def _common(self, batch: Tree) -> Tree:
        """Returns specs that fit the batches of before, too."""
        specs = specs_of(batch)
        key = str([(p, leaf is None) for p, leaf in trees.with_paths(batch)])
        new, old = map(trees.present, (specs, self._seen.get(key, specs)))
        common = [
            one.most_specific_common_supertype([other])
            for one, other in zip(new, old, strict=True)
        ]
        if all(
            two is not None and one.shape.rank == two.shape.rank
            for one, two in zip(new, common, strict=True)
        ):
            specs = trees.refill(specs, common)
        self._seen[key] = specs
        return specs


def specs_of(batch: Tree) -> Tree:
    """The specs of batches like this one, of any number of samples."""
    return trees.map_leaves(spec_of_any, batch)


def spec_of_any(leaf: Any) -> Any:
    """The spec of leaves like this one, of any number of samples."""
    return _of_any_batch_size(tf.type_spec_from_value(leaf))


def specs_of_shard(specs: Tree, count: int) -> Tree:
    """The specs of a replica's shard of batches of these specs.

    Its number of samples is known where the batch's is, and divides evenly.
    """

    def shard(spec: Any) -> Any:
        rows = _known_rows(spec)
        if not rows or rows % count:
            return _of_any_batch_size(spec)
        return _of_rows(spec, rows // count)

    return specs if count == 1 else trees.map_leaves(shard, specs)


def specs_of_whole(specs: Tree, count: int) -> Tree:
    """The specs of a batch of which a replica's shard has these specs."""

    def whole(spec: Any) -> Any:
        rows = _known_rows(spec)
        return spec if rows is None else _of_rows(spec, rows * count)

    return trees.map_leaves(whole, specs)


def _known_rows(spec: Any) -> int | None:
    return spec.shape[0] if _is_dense(spec) else None


def _is_dense(spec: Any) -> bool:
    """Whether it is of tensors of samples that have one row each."""
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank)


def opened(specs: Tree) -> Tree:
    """The specs, of any number of samples."""
    return trees.map_leaves(_of_any_batch_size, specs)


def sizes_are_known(specs: Tree) -> bool:
    """Whether all leaves that have samples say how many."""
    ranked = [s for s in trees.present(specs) if s.shape.rank != 0]
    return all(s.shape.rank and s.shape[0] is not None for s in ranked)


def relaxed_spec(leaf: Any) -> Any:
    """The spec of leaves like this one, of any sizes."""
    if isinstance(leaf, tf.Tensor):
        return tf.TensorSpec([None] * leaf.shape.rank, leaf.dtype)
    return spec_of_any(leaf)


def with_shape(spec: Any, shape: Any) -> Any:
    """The spec of such values of another shape."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)


def _of_any_batch_size(spec: Any) -> Any:
    return _of_rows(spec, None) if spec.shape.rank else spec


def _of_rows(spec: Any, rows: int | None) -> Any:
    return with_shape(spec, [rows, *spec.shape[1:]])


def _with_rows(specs: Tree, batch: Tree) -> Tree:
    def known(spec: Any, leaf: Any) -> Any:
        return _of_rows(spec, leaf.shape[0]) if _is_dense(spec) else spec

    return keras.tree.map_structure(known, specs, batch)
