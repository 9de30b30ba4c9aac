"""Global batches of the parts that processes bring.

The k-th global batch is the k-th batches of all processes, in their order. A
process whose data have ended, or that has no samples in a batch, takes part
with a stand-in of no weight. Before an execution, each process describes its
batches to the others, and all conclude the same from the descriptions.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import broadcast_bytes
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_iterators
from keras_conflux._fit.input import host_to_device
from keras_conflux._fit.input import specs
from keras_conflux._fit.input.batch_sharder import BatchSharder
from keras_conflux._fit.input.batch_sharder import checksum
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


class LocalSharder(BatchSharder):
    """Shards the batches of one process, and joins them with others'."""

    def __init__(
        self, strategy: ReplicatedStrategy, stacks: bool, name: str, quiet: bool
    ) -> None:
        devices = strategy.devices
        own = host_to_device.Placement(devices, 0, len(devices))
        super().__init__(strategy, stacks, placement=own)
        self._name, self._quiet = name, quiet
        self._latest: Batch | None = None
        """The last batch with samples, or another process' batch."""
        self._latest_kind = 0
        """Its kind, the same in all processes."""

    def _checksum(self, batches: list[Tree]) -> int:
        return 0  # each process has other batches

    def join(self, batches: list[Batch], spec: Tree = None) -> list[Batch]:
        """See `BatchSharder`."""
        with errors_reported_to_all(f"a batch of {self._name}"):
            what = f"the next batches of {self._name}"
            mine = self._described(batches)
            is_known = self._latest or self._quiet
            sums = [] if is_known else [checksum([x.shards]) for x in batches]
            own = *dataclasses.astuple(mine), sums
            given = all_gather_json(what, own)
            told = [_Told(*each) for *each, _ in given]
            if sums and all(others == sums for *_, others in given):
                warn(
                    f"{self._name}: all processes bring the same rows, which "
                    "count once for each. Give each process its share, also of "
                    "`validation_data`, as by `keras_conflux.shard((x, y))`."
                )
            are_alike = told.count(told[0]) == len(told)
            if batches and are_alike and all(told[0].samples):
                self._latest = batches[-1]
                self._latest_kind = mine.kinds[-1]
                return [
                    dataclasses.replace(each, sizes=each.sizes * len(told))
                    for each in batches
                ]
            singles = itertools.chain.from_iterable(batches)
            samples = _by_position(each.samples for each in told)
            kinds = _by_position(each.kinds for each in told)
            return [
                self._joined(next(singles, None), *each, spec)
                for each in zip(samples, kinds, strict=True)
            ]

    def _described(self, batches: Sequence[Batch]) -> _Told:
        told = _Told([], [], [])
        for batch in batches:
            samples = sum(batch.sizes)
            text = str(_description(batch)).encode()
            kind = zlib.crc32(text) if samples else 0
            told.samples += [samples] * batch.steps
            told.kinds += [kind] * batch.steps
            is_stack = isinstance(batch, StackedBatch)
            told.stacks.append(batch.steps if is_stack else 0)
        return told

    def _joined(
        self,
        own: Batch | None,
        samples: Sequence[int],
        kinds: Sequence[int],
        spec: Tree,
    ) -> Batch:
        """Returns one global batch, of which this process may have nothing."""
        if len(set(filter(None, kinds))) > 1:
            self._refuse(own)
        if not any(samples):
            raise ValueError(
                f"{self._name}: a batch has no samples in any of the "
                f"{process_count()} processes."
            )
        root = next(i for i, count in enumerate(samples) if count)
        is_new = self._latest_kind != kinds[root]
        lacking = [is_new and not count for count in samples]
        if own is not None and sum(own.sizes):
            self._latest = own
        elif self._latest is not None:
            *_, self._latest = self._latest
        if any(lacking):
            given = sample_of_process(root, own, self._name)
            if lacking[process_index()]:
                self._latest = self._on_devices(given, own, spec)
        self._latest_kind = kinds[root]
        count = len(self._strategy.devices)
        sizes = tuple(x for n in samples for x in rows.sizes(n, count))
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
        return next(iter(moved))

    def _refuse(self, own: Batch | None) -> None:
        described = _description(own) if own and sum(own.sizes) else None
        told = all_gather_json(f"what differs in {self._name}", described)
        raise ReplicaMismatchError(
            f"{self._name}: the processes' parts of a batch differ in more "
            f"than their number of samples: {listed(told)}. "
            "Together they are one batch: give all the same structure, dtypes "
            "and shapes, and pad leaves of varying length."
        )


def _by_position(numbers: Iterable[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of all processes for one batch after another."""
    return itertools.zip_longest(*numbers, fillvalue=0)


def _description(batch: Batch) -> str:
    """Describes the parts of a batch for an error."""
    first = next(iter(batch))
    flat = trees.flatten(trees.refill(first.specs[0], first.shards[0]))
    leaves = zip(trees.paths(first.specs[0]), flat, strict=True)
    texts = [f"{path}: {_of_leaf(leaf)}" for path, leaf in leaves]
    lengths = {*rows.sample_counts(first.shards[0]).values()}
    # Leaves of different lengths are in one proportion, as in one process.
    if len(lengths) > 1:
        texts.append(
            f"leaves of different lengths for {sum(first.sizes)} samples, of "
            "which all processes must then have as many"
        )
    return ", ".join(texts)


def _of_leaf(leaf: Any) -> str:
    if leaf is not None and not leaf.shape.rank:
        return f"{leaf.dtype.name} {tf.get_static_value(leaf)}"
    return _said(_in_words(None if leaf is None else specs.spec_of_any(leaf)))


def listed(told: list[Any]) -> str:
    """Returns a list of each process' data, in words."""
    return "; ".join(
        f"process {i}: {each or 'nothing'}" for i, each in enumerate(told)
    )


def agree_on_specs(iterator: Any, name: str) -> Tree:
    """Makes an epoch iterator last as long as any process' does.

    Returns the `tf.TypeSpec`s that the batches of all processes fit.
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
    count = None if None in numbers else max(numbers)
    keras_iterators.set_number_of_batches(iterator, count)
    alike = all(each == paths[0] for each in paths)
    leaves = [*zip(*words, strict=True)] if alike else []
    if not alike or not all(map(_can_be_joined, leaves)):
        texts = [
            ", ".join(f"{p}: {_said(x)}" for p, x in zip(*each, strict=True))
            for each in zip(paths, words, strict=True)
        ]
        raise ReplicaMismatchError(
            f"{name}: the data of the processes differ in more than their "
            f"number of samples: {listed(texts)}. Together they are one batch: "
            "give all the same structure, dtypes and shapes."
        )
    flat = [
        None if leaf is None else specs.with_shape(leaf, _common_shape(same))
        for leaf, same in zip(trees.flatten(spec), leaves, strict=True)
    ]
    return keras.tree.pack_sequence_as(spec, flat)


def sample_of_process(root: int, own: Batch | None, name: str) -> list[Any]:
    """Returns a sample of another process, for one that has none."""
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
        [_spec_of(*each) for each in words], tensors, expand_composites=True
    )


def _of_one_sample(leaves: list[Any]) -> list[Any]:
    lengths = {*rows.sample_counts(leaves).values()}
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


def _said(leaf: list[Any] | None) -> str:
    if leaf is None:
        return "None"
    return f"{leaf[0]} {trees.describe(_spec_of(*leaf))}"


def _can_be_joined(leaves: Sequence[Any]) -> bool:
    """Whether leaves of all processes may be of one batch."""
    kinds = [leaf and leaf[:3] for leaf in leaves]
    known = [leaf[3] for leaf in leaves if leaf and leaf[3] is not None]
    sizes = [*zip(*known, strict=False)]
    return (
        all(kind == kinds[0] for kind in kinds)
        and len(set(map(len, known))) <= 1
        and all(len(set(each) - {None}) <= 1 for each in sizes[1:])
    )


def _common_shape(leaves: Sequence[Any]) -> tf.TensorShape:
    """Returns the shape of all, without the sizes that not all say alike."""
    shapes = [tf.TensorShape(leaf[3]) for leaf in leaves]
    common = tf.TensorShape.most_specific_compatible_shape
    return functools.reduce(common, shapes)


def _spec_of(kind: str, dtype: str, ragged_rank: int, shape: Any) -> Any:
    """Returns the spec that `_in_words` has told."""
    if kind == "RaggedTensor":
        return tf.RaggedTensorSpec(shape, tf.as_dtype(dtype), ragged_rank)
    of_kind = tf.SparseTensorSpec if kind == "SparseTensor" else tf.TensorSpec
    return of_kind(shape, tf.as_dtype(dtype))
