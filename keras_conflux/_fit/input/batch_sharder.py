"""Shards global batches over the replicas."""

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._fit.input import host_to_device
from keras_conflux._fit.input.device_batches import Batch
from keras_conflux._fit.input.device_batches import StackedBatch
from keras_conflux._fit.input.specs import Specs
from keras_conflux._fit.input.specs import specs_of
from keras_conflux._fit.input.specs import specs_of_shard
from keras_conflux._replication.strategy import ReplicatedStrategy

_CHECKED_ENTRIES = 4096
"""How many entries of a tensor its checksum is of, at most."""


class BatchSharder:
    """Shards the batches of one source of data, as evenly as can be.

    It stacks those that divide evenly, if it `stacks`. For `keep_rows` see
    `Specs`. Each replica runs its shard in so many turns.
    """

    def __init__(
        self,
        strategy: ReplicatedStrategy,
        stacks: bool,
        keep_rows: bool = False,
        turns: int = 1,
        placement: host_to_device.Placement | None = None,
    ) -> None:
        communicator = strategy.communicator
        self._strategy = strategy
        self._stacks = stacks
        self._has_warned = False
        self._specs = Specs(keep_rows)
        self._placement = placement or host_to_device.Placement(
            strategy.devices, communicator.rank(0), communicator.size
        )
        self._parts = self._placement.count * turns

    def _checksum(self, batches: list[Tree]) -> int:
        return checksum(batches)

    def join(self, batches: list[Batch], spec: Tree = None) -> list[Batch]:
        """Makes global batches of sharded batches, where they are parts."""
        return batches

    def __call__(self, drawn: Sequence[Tree], spec: Tree = None) -> list[Batch]:
        """Shards some batches and moves each shard to its device.

        They come from an iterator over global batches, or from a user's own
        `DistributedDataset`, which are sharded already. A step is traced for
        the specs of the iterator, as on one device: traced for the shapes of a
        batch, it would be traced again for the last one.
        """
        sharded: list[Batch] = []
        batches = [keras.tree.map_structure(_as_tensor, x) for x in drawn]
        for key, group in itertools.groupby(batches, self._shape):
            if key is None:
                sharded.extend(self._one(batch, spec) for batch in group)
            else:
                sharded.append(self._several(list(group), spec))
        return sharded

    def _shape(self, batch: Tree) -> Any:
        """The properties that the batches of a stack share, or `None`."""
        leaves = trees.present(batch)
        if not self._stacks or not all(map(host_to_device.is_dense, leaves)):
            return None
        lengths = {leaf.shape[0] if leaf.shape.rank else 0 for leaf in leaves}
        if any(length == 0 or length % self._parts for length in lengths):
            return None
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        return str(trees.paths(batch)), shapes

    def _one(self, batch: Tree, spec: Tree = None) -> Batch:
        kind = tf.distribute.DistributedValues
        if any(isinstance(leaf, kind) for leaf in trees.flatten(batch)):
            return self._as_given(batch)
        sizes, specs = self._sizes_and_specs(batch, spec)
        shards = host_to_device.moved([trees.present(batch)], self._placement)
        return Batch(shards, sizes, specs, checksum=self._checksum([batch]))

    def _several(self, batches: list[Tree], spec: Tree) -> StackedBatch:
        leaves = [trees.present(batch) for batch in batches]
        shards = host_to_device.move_stacked(leaves, self._placement)
        sizes, specs = self._sizes_and_specs(batches[0], spec)
        total = self._checksum(batches)
        return StackedBatch(shards, sizes, specs, len(batches), checksum=total)

    def _as_given(self, batch: Tree) -> Batch:
        if self._strategy.communicator.spans_processes:
            raise NotImplementedError(
                "A DistributedDataset has the shards of one process. Give "
                "`fit` the data set itself: each process takes its rows."
            )
        local = self._strategy.experimental_local_results
        shards = [
            trees.map_leaves(lambda leaf, i=index: local(leaf)[i], batch)
            for index in range(len(self._strategy.devices))
        ]
        return Batch(
            [trees.present(shard) for shard in shards],
            tuple(rows.sample_count(shard) for shard in shards),
            [specs_of(shard) for shard in shards],
        )

    def _sizes_and_specs(
        self, batch: Tree, spec: Tree
    ) -> tuple[tuple[int, ...], list[Tree]]:
        count = self._placement.count
        total = rows.sample_count(batch, self._parts)
        if self._parts > 1:
            self._warn_of_lengths(rows.sample_counts(batch))
        shard = specs_of_shard(self._specs(batch, spec), count)
        sizes = tuple(rows.sizes(total, count))
        return sizes, [shard] * len(self._placement.devices)

    def _warn_of_lengths(self, lengths: dict[str, int]) -> None:
        if self._has_warned or len(set(lengths.values())) == 1:
            return
        self._has_warned = True
        listed = ", ".join(f"{n} at {path}" for path, n in lengths.items())
        warn(
            "The leaves of a batch have different numbers of rows: "
            f"{listed}. Each replica gets its part of each leaf, as is right "
            "where the rows of one leaf meet another's in no more than "
            "sums and means. Where every sample is to meet all rows of a leaf, "
            "as candidates, or the nodes of a graph by their numbers, keep "
            "that leaf in the model, repeat it for each sample, or make it a "
            "ragged tensor with one row a sample."
        )


class WholeBatchSharder(BatchSharder):
    """Leaves batches whole, and moves them to the first device."""

    def __init__(self, strategy: ReplicatedStrategy) -> None:
        first = host_to_device.Placement(strategy.devices[:1], 0, 1)
        super().__init__(strategy, stacks=False, placement=first)

    def _as_given(self, batch: Tree) -> Batch:
        local = self._strategy.experimental_local_results
        joined = trees.map_leaves(lambda x: rows.joined(local(x)), batch)
        return self._one(joined)


def _as_tensor(leaf: Any) -> Any:
    """Makes tensors of arrays, and `None` of Keras' Optionals."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    kinds = tf.Tensor | tf.SparseTensor | tf.RaggedTensor
    if isinstance(leaf, kinds | tf.distribute.DistributedValues):
        return leaf
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(leaf)


def checksum(batches: list[Tree]) -> int:
    """Returns a number that is equal for equal batches; 0 in one process.

    It is of a sample of their bytes: reading each would take as long as a step.
    """
    if process_count() == 1:
        return 0
    result = 0
    for leaf in tf.nest.flatten(batches, expand_composites=True):
        if leaf is not None:
            result = zlib.crc32(_sampled_bytes(leaf), result)
    return result


def _sampled_bytes(tensor: Any) -> bytes:
    flat = np.ravel(np.asarray(tensor))
    entries = flat[:: max(1, len(flat) // _CHECKED_ENTRIES)]
    if entries.dtype == object:  # strings
        return b"\0".join(map(bytes, entries))
    return f"{flat.shape} {flat.dtype}".encode() + entries.tobytes()
