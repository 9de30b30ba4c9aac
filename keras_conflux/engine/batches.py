"""Cuts global batches into the replicas' parts and moves them there."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux import _tensorflow
from keras_conflux import feed
from keras_conflux import trees
from keras_conflux.engine.specs import Specs
from keras_conflux.engine.specs import loose_spec
from keras_conflux.engine.specs import specs_of
from keras_conflux.engine.specs import specs_of_part
from keras_conflux.engine.window import power_of_two
from keras_conflux.strategy import ReplicatedStrategy
from keras_conflux.trees import Tree

STAGED = 512 * 2**20
"""So many bytes a device are stacked on the host at once. It is memory that
GPUs can read directly, and a second is needed to lock a gigabyte of it."""


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
        if not self._stacks or not all(map(_is_plain, leaves)):
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
        parts = self._move([trees.present(batch)], stack=False)
        return Batch(parts, sizes, specs)

    def _several(self, batches: list[Tree], spec: Tree) -> Stack:
        leaves = [trees.present(batch) for batch in batches]
        room = STAGED * len(self._strategy.devices)
        most = power_of_two(room // max(size_in_bytes(batches[0]), 1))
        groups = [
            self._move(leaves[first : first + most], stack=True)
            for first in range(0, len(leaves), most)
        ]
        sizes, specs = self._sizes_and_specs(batches[0], spec)
        return Stack(self._joined(groups), sizes, specs, len(batches))

    def _move(self, batches: list[list[Any]], stack: bool) -> list[list[Any]]:
        """Returns each replica's leaves, on its device."""
        homes = tuple(_home(leaf) for leaf in batches[0])
        options = homes, self._strategy.devices, stack
        if not self._strategy.communicator.on_gpu:
            return _move(batches, *options)
        # In a graph all leaves travel at once. One after another, each would
        # wait for what its GPU is computing (GPUUtil::CopyCPUTensorToGPU).
        describe = tf.type_spec_from_value if stack else loose_spec
        specs = tuple(map(describe, batches[0]))
        return _mover(specs, len(batches), *options)(batches)

    def _joined(self, groups: list[list[list[Any]]]) -> list[list[Any]]:
        """Returns each replica's leaves of all groups, on its device."""
        if len(groups) == 1:
            return groups[0]
        parts = []
        for device, *pieces in zip(
            self._strategy.devices, *groups, strict=True
        ):
            with tf.device(device):
                joined = [tf.concat(x, 0) for x in zip(*pieces, strict=True)]
            parts.append(joined)
        return parts

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
            tuple(feed.sample_count(part) for part in parts),
            [specs_of(part) for part in parts],
        )

    def _sizes_and_specs(
        self, batch: Tree, spec: Tree
    ) -> tuple[tuple[int, ...], list[Tree]]:
        count = len(self._strategy.devices)
        total = feed.sample_count(batch)
        limits = [feed.bounds(total, index, count) for index in range(count)]
        part = specs_of_part(self._specs(batch, spec), count)
        return tuple(end - begin for begin, end in limits), [part] * count


def size_in_bytes(batch: Tree) -> int:
    """Returns what the arrays and tensors of a batch take in memory."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return sum(
        leaf.dtype.size * (leaf.shape.num_elements() or 0)
        if isinstance(leaf, tf.Tensor)
        else getattr(leaf, "nbytes", 0)
        for leaf in leaves
    )


def shares(sizes: Any) -> list[tf.Tensor]:
    """Returns each replica's part of the samples; together they are one."""
    floats = [tf.cast(size, tf.float32) for size in sizes]
    total = tf.add_n(floats)
    return [tf.math.divide_no_nan(size, total) for size in floats]


@functools.lru_cache(maxsize=256)  # so that the next `fit` traces nothing
def _mover(specs: tuple, number: int, *options: Any) -> Callable:
    return _tensorflow.graph_function(
        lambda batches: _move(batches, *options), [[list(specs)] * number]
    )


def _move(
    batches: list[list[Any]],
    homes: Sequence[str],
    devices: Sequence[str],
    stack: bool,
) -> list[list[Any]]:
    count = len(devices)
    parts = []
    for index, device in enumerate(devices):
        part = []
        for home, *leaves in zip(homes, *batches, strict=True):
            # Cut where it lies, so that only this replica's rows travel. What
            # is stacked on the host is in memory that GPUs can read directly.
            with tf.device(home):
                rows = [feed.part_of(x, index, count, True) for x in leaves]
                joined = tf.stack(rows) if stack else rows[0]
            with tf.device(device):
                part.append(
                    tf.identity(joined) if _is_plain(joined) else joined
                )
        parts.append(part)
    return parts


def _home(leaf: Any) -> str:
    return (_is_plain(leaf) and leaf.device) or "CPU:0"


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string


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
