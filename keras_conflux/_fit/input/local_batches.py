"""Global batches of the parts that processes bring.

The k-th global batch is the k-th batches of all processes, in their order. A
process whose data have ended, or that has no samples in a batch, takes part
with a stand-in of no weight. Before an execution, each process describes its
batches to the others, and all conclude the same from the descriptions.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.trees import Tree
from keras_conflux._fit.input import host_to_device
from keras_conflux._fit.input import local_data
from keras_conflux._fit.input.batch_sharder import BatchSharder
from keras_conflux._fit.input.device_batches import Batch
from keras_conflux._fit.input.device_batches import StackedBatch
from keras_conflux._replication.strategy import ReplicatedStrategy


@dataclasses.dataclass
class _Told:
    """A process' description of the batches that it brings."""

    samples: list[int]
    """How many each has."""
    kinds: list[int]
    """A checksum of each one's description; 0 if it has no samples."""
    stacks: list[int]
    """How many batches each of its stacks has; 0 for a batch that is none."""
    latest: int
    """The kind of the stand-in that it has for samples, 0 without."""


class LocalSharder(BatchSharder):
    """Shards the batches of one process, and joins them with other processes'.

    Args:
        strategy: The strategy that replicates the model.
        stacks: Whether to stack those that divide evenly.
        name: The call whose batches they are, in messages.
    """

    def __init__(
        self, strategy: ReplicatedStrategy, stacks: bool, name: str
    ) -> None:
        super().__init__(strategy, stacks)
        self._name = name
        self._latest: Batch | StackedBatch | None = None
        """The last batch with samples, or another process' batch."""
        self._latest_kind = 0

    def _placed(self) -> host_to_device.Placement:
        devices = self._strategy.devices
        return host_to_device.Placement(devices, 0, len(devices))

    def _checksum(self, batches: list[Tree]) -> int:
        return 0  # each process has other batches

    def join(
        self, batches: list[Batch | StackedBatch], spec: Tree = None
    ) -> list[Batch | StackedBatch]:
        """See `BatchSharder`."""
        with errors_reported_to_all(f"a batch of {self._name}"):
            what = f"the next batches of {self._name}"
            mine = self._described(batches)
            everything = all_gather_json(what, dataclasses.astuple(mine))
            told = [_Told(*each) for each in everything]
            if batches and _are_alike(told):
                self._latest = batches[-1]
                self._latest_kind = mine.kinds[-1]
                return [
                    dataclasses.replace(each, sizes=each.sizes * len(told))
                    for each in batches
                ]
            singles = list(itertools.chain.from_iterable(map(_apart, batches)))
            longest = max(len(each.samples) for each in told)
            return [
                self._joined(singles, told, position, spec)
                for position in range(longest)
            ]

    def _described(self, batches: Sequence[Batch | StackedBatch]) -> _Told:
        told = _Told([], [], [], self._latest_kind)
        for batch in batches:
            count = getattr(batch, "count", 1)
            samples = sum(batch.sizes)
            text = str(_description(batch)).encode()
            kind = zlib.crc32(text) if samples else 0
            told.samples += [samples] * count
            told.kinds += [kind] * count
            told.stacks.append(getattr(batch, "count", 0))
        return told

    def _joined(
        self,
        singles: list[Batch],
        told: list[_Told],
        position: int,
        spec: Tree,
    ) -> Batch:
        """Returns one global batch, of which this process may have nothing."""
        samples, kinds = (
            [
                getattr(each, name)[position]
                if position < len(each.samples)
                else 0
                for each in told
            ]
            for name in ("samples", "kinds")
        )
        own = singles[position] if position < len(singles) else None
        if len(set(filter(None, kinds))) > 1:
            self._refuse(own)
        if not any(samples):
            raise ValueError(
                f"{self._name}: a batch has no samples in any of the "
                f"{process_count()} processes."
            )
        root = next(i for i, count in enumerate(samples) if count)
        lacking = [
            each.latest != kinds[root] and not count
            for each, count in zip(told, samples, strict=True)
        ]
        if own is not None and sum(own.sizes):
            self._latest = own
        elif self._latest is not None:
            *_, self._latest = _apart(self._latest)
        if any(lacking):
            given = local_data.sample_of_process(root, own, self._name)
            if lacking[process_index()]:
                self._latest = self._on_devices(given, own, spec)
        self._latest_kind = kinds[root]
        for each in told:
            each.latest = kinds[root]
        count = len(self._strategy.devices)
        limits = [
            rows.bounds(total, index, count)
            for total in samples
            for index in range(count)
        ]
        sizes = tuple(end - begin for begin, end in limits)
        assert self._latest is not None
        joined = dataclasses.replace(self._latest, sizes=sizes)
        # A program that is traced for a number of samples takes it for granted.
        return joined if len(set(sizes)) == 1 else joined.opened()

    def _on_devices(
        self, leaves: list[Any], own: Batch | None, spec: Tree
    ) -> Batch:
        structure = spec if own is None else own.specs[0]
        batch = trees.refill(structure, leaves)
        (moved,) = self([batch], spec)
        return next(iter(_apart(moved)))

    def _refuse(self, own: Batch | None) -> None:
        has_samples = own is not None and sum(own.sizes)
        described = _description(own) if own and has_samples else None
        told = all_gather_json(f"what differs in {self._name}", described)
        raise ReplicaMismatchError(
            f"{self._name}: the processes' parts of a batch differ in more "
            f"than their number of samples: {local_data.listed(told)}. "
            "Together they are one batch: give all the same structure, dtypes "
            "and shapes, and pad leaves of varying length."
        )


def _are_alike(told: list[_Told]) -> bool:
    first = dataclasses.astuple(told[0])[:3]
    alike = all(dataclasses.astuple(each)[:3] == first for each in told)
    return alike and all(told[0].samples)


def _apart(batch: Batch | StackedBatch) -> list[Batch]:
    return list(batch) if isinstance(batch, StackedBatch) else [batch]


def _description(batch: Batch | StackedBatch) -> str:
    """Describes the parts of a batch for an error."""
    first = next(iter(_apart(batch)))
    leaves = zip(trees.paths(first.specs[0]), _flat(first), strict=True)
    texts = [f"{path}: {_of_leaf(leaf)}" for path, leaf in leaves]
    lengths = {
        int(rows.length_of(leaf)) for leaf in first.shards[0] if leaf.shape.rank
    }
    # Leaves of different lengths are in one proportion, as in one process.
    if len(lengths) > 1:
        texts.append(
            f"leaves of different lengths for {sum(first.sizes)} samples, of "
            "which all processes must then have as many"
        )
    return ", ".join(texts)


def _flat(batch: Batch) -> list[Any]:
    return trees.flatten(trees.refill(batch.specs[0], batch.shards[0]))


def _of_leaf(leaf: Any) -> str:
    if leaf is None:
        return "None"
    if not leaf.shape.rank:
        return f"{leaf.dtype.name} {tf.get_static_value(leaf)}"
    kind = "" if isinstance(leaf, tf.Tensor) else f"{type(leaf).__name__} "
    sizes = ", ".join("?" if n is None else str(n) for n in leaf.shape[1:])
    return f"{kind}{leaf.dtype.name} rows of ({sizes})"
