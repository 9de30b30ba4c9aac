"""Cuts global batches into the replicas' parts."""

import dataclasses
import itertools
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._data import rows
from keras_conflux._fit.input import host_to_device
from keras_conflux._fit.input.specs import Specs
from keras_conflux._fit.input.specs import specs_of
from keras_conflux._fit.input.specs import specs_of_part
from keras_conflux._replication.strategy import ReplicatedStrategy


@dataclasses.dataclass(frozen=True)
class Batch:
    """A global batch in parts, one a replica, in replica order."""

    parts: list[list[Any]]
    """Each replica's leaves that are not `None`. A replica without samples
    gets one of another's to run on."""
    sizes: tuple[int, ...]
    """How many samples of the global batch each replica has; may be 0."""
    specs: list[Tree]
    """The `tf.TypeSpec`s that each replica's program is traced for."""

    @property
    def signature(self) -> tuple:
        """What two batches of one tracing share."""
        return tuple(
            (str(trees.paths(spec)), tuple(trees.flatten(spec)))
            for spec in self.specs
        )


@dataclasses.dataclass(frozen=True)
class Stack(Batch):
    """Batches of one shape that divide evenly.

    Each replica's leaves are of shape `(count, part of a batch, ...)`; `sizes`
    and `specs` are those of one batch.
    """

    count: int
    """How many batches."""

    @property
    def shape(self) -> tuple:
        """The shapes and dtypes of a replica's part of one batch."""
        return tuple((tuple(x.shape[1:]), x.dtype.name) for x in self.parts[0])

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches one by one."""
        for position in range(self.count):
            parts = [[leaf[position] for leaf in part] for part in self.parts]
            yield Batch(parts, self.sizes, self.specs)

    def singles(self) -> "Iterator[Stack]":
        """Yields the batches one by one, each as a stack of one."""
        for batch in self:
            parts = [[leaf[None] for leaf in part] for part in batch.parts]
            yield Stack(parts, self.sizes, self.specs, 1)


class Splitter:
    """Splits batches among the replicas, as evenly as can be.

    Args:
        strategy: What replicates the model.
        stacks: Whether to stack those that divide evenly.
    """

    def __init__(self, strategy: ReplicatedStrategy, stacks: bool) -> None:
        self._strategy = strategy
        self._stacks = stacks
        self._specs = Specs()

    def __call__(
        self, drawn: Sequence[Tree], spec: Tree = None
    ) -> list[Batch | Stack]:
        """Splits some batches and moves each part to its device.

        Args:
            drawn: What an iterator over global batches has yielded, or what a
                user's own `DistributedDataset` has, which is split already.
            spec: The `tf.TypeSpec`s that the iterator says it yields. A step
                is traced for these, as on one device: traced for the shapes
                of a batch instead, it would be traced again for the last one,
                and what depends on static shapes would differ from one
                device.
        """
        pieces: list[Batch | Stack] = []
        batches = [_standardized(batch) for batch in drawn]
        for key, group in itertools.groupby(batches, self._shape):
            if key is None:
                pieces.extend(self._one(batch, spec) for batch in group)
            else:
                pieces.append(self._several(list(group), spec))
        return pieces

    def _shape(self, batch: Tree) -> Any:
        """What the batches of a stack share, or `None`."""
        leaves = trees.present(batch)
        count = len(self._strategy.devices)
        if not self._stacks or not all(map(host_to_device.is_plain, leaves)):
            return None
        lengths = {leaf.shape[0] if leaf.shape.rank else 0 for leaf in leaves}
        length = lengths.pop()
        if lengths or length == 0 or length % count:
            return None
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        return str(trees.paths(batch)), shapes

    def _one(self, batch: Tree, spec: Tree) -> Batch:
        if _is_distributed(batch):
            return self._as_given(batch)
        sizes, specs = self._sizes_and_specs(batch, spec)
        parts = host_to_device.move(trees.present(batch), self._strategy)
        return Batch(parts, sizes, specs)

    def _several(self, batches: list[Tree], spec: Tree) -> Stack:
        leaves = [trees.present(batch) for batch in batches]
        parts = host_to_device.move_stacked(leaves, self._strategy)
        sizes, specs = self._sizes_and_specs(batches[0], spec)
        return Stack(parts, sizes, specs, len(batches))

    def _as_given(self, batch: Tree) -> Batch:
        parts = [
            trees.map_leaves(
                lambda leaf, i=index: self._strategy.experimental_local_results(
                    leaf
                )[i],
                batch,
            )
            for index in range(len(self._strategy.devices))
        ]
        return Batch(
            [trees.present(part) for part in parts],
            tuple(rows.sample_count(part) for part in parts),
            [specs_of(part) for part in parts],
        )

    def _sizes_and_specs(
        self, batch: Tree, spec: Tree
    ) -> tuple[tuple[int, ...], list[Tree]]:
        count = len(self._strategy.devices)
        total = rows.sample_count(batch)
        limits = [rows.bounds(total, index, count) for index in range(count)]
        part = specs_of_part(self._specs(batch, spec), count)
        return tuple(end - begin for begin, end in limits), [part] * count


def shares(sizes: Any) -> list[tf.Tensor]:
    """Returns each replica's part of the samples; together they are one."""
    floats = [tf.cast(size, tf.float32) for size in sizes]
    total = tf.add_n(floats)
    return [tf.math.divide_no_nan(size, total) for size in floats]


def _is_distributed(batch: Tree) -> bool:
    kind = tf.distribute.DistributedValues
    return any(isinstance(leaf, kind) for leaf in trees.flatten(batch))


def _standardized(batch: Tree) -> Tree:
    """Makes tensors of arrays, and `None` of Optionals.

    Keras' adapters put an Optional where a batch has `None`.
    """
    return keras.tree.map_structure(
        lambda leaf: (
            None
            if leaf is None or isinstance(leaf, tf.experimental.Optional)
            else _as_tensor(leaf)
        ),
        batch,
    )


def _as_tensor(leaf: Any) -> Any:
    kinds = tf.Tensor | tf.SparseTensor | tf.RaggedTensor
    if isinstance(leaf, kinds | tf.distribute.DistributedValues):
        return leaf
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(leaf)
