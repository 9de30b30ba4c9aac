"""A strategy's work outside of its replicas, where processes share them.

Each process calls it, in the same order. A reduction is a collective of all
replicas, in the order of the program's others.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.failures import of_all_processes
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import rows
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._compat import cross_device
from keras_conflux._compat import per_replica
from keras_conflux._replication.replica_context import replica_collectives

_Runner = Callable[[Callable[..., Any], Any], Callable[..., Any]]
_runners: list[_Runner] = []
run_everywhere_by = _runners.append
"""Sets who runs functions on the devices of a strategy."""


def run_everywhere(
    function: Callable[..., Any], strategy: Any
) -> Callable[..., Any]:
    """Returns a function that runs one on every device."""
    convert = tf.autograph.experimental.do_not_convert
    return _runners[-1](convert(function), strategy)


class AcrossProcesses(tf.distribute.CrossDeviceOps):
    """TensorFlow's reductions, of values on the replicas of all processes."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy
        # Of unknown ranks, as one function for all has, none can be joined.
        self._compiled = functools.cache(
            lambda axis, ranks: run_everywhere(self._reduced(axis), strategy)
        )

    @property
    def _num_between_graph_workers(self) -> int:
        return process_count()

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, _: Any
    ) -> Any:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, None)[0]

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Any, _: Any
    ) -> Any:
        found = self._on_each(None, [x for x, _ in value_destination_pairs])
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            count = self._strategy.communicator.size
            found = [cross_device.mean_of(each, count) for each in found]
        return [
            cross_device.placed(copies, *pair)
            for copies, pair in zip(found, value_destination_pairs, strict=True)
        ]

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, _: Any
    ) -> Any:
        (found,) = self._on_each(axis, [per_replica_value])
        return cross_device.placed(found, per_replica_value, destinations)

    def _on_each(self, axis: int | None, values: list[Any]) -> list[Any]:
        """Returns each value's sum, or its join along an axis."""
        parts = [cross_device.as_tensors(value) for value in values]
        given = [per_replica.of(each) for each in parts]
        if tf.executing_eagerly():
            ranks = [getattr(x, "values", x).shape.rank for x, *_ in parts]
            found = self._compiled(axis, tuple(ranks))(given)
            return [*zip(*found, strict=True)]
        found = self._strategy.run(self._reduced(axis), (given,))
        return [cross_device.as_tensors(each) for each in found]

    def _reduced(self, axis: int | None) -> Callable[..., Any]:
        @tf.autograph.experimental.do_not_convert
        def reduced(parts: list[Any]) -> Any:
            if axis is None:
                return replica_collectives().all_reduce("sum", parts)
            return replica_collectives().all_gather(parts, axis)

        verb = "reduce" if axis is None else "gather"
        reduced.__qualname__ = f"strategy.{verb}"
        return reduced

    def shards(self, dataset: Any) -> Any:
        """Returns a data set of the parts of each batch for replicas here.

        All processes draw all batches, as they do for `fit`, and so equally
        many. Where each has data of its own, the replicas of all have an equal
        part of a batch, and those here take one after another.
        """
        policies = tf.data.experimental.AutoShardPolicy
        given = dataset.options().experimental_distribute.auto_shard_policy
        communicator = self._strategy.communicator
        ranks = range(communicator.size)
        if given in (policies.AUTO, policies.DATA):
            here = len(communicator.devices)
            ranks = ranks[communicator.rank(0) :][:here]
        elif given != policies.OFF:
            raise NotImplementedError(
                "All processes draw the same batches from a dataset, and each "
                "takes its rows, or, with `AutoShardPolicy.OFF`, all rows. "
                f"Received: {given}. Where each is to read its own files, "
                "write `strategy.distribute_datasets_from_function`."
            )

        def of_ranks(*batch: Any) -> Any:
            whole = batch if len(batch) > 1 else next(iter(batch))
            size = communicator.size
            parts = [rows.shard_of(whole, rank, size) for rank in ranks]
            datasets = map(tf.data.Dataset.from_tensors, parts)
            return functools.reduce(tf.data.Dataset.concatenate, datasets)

        return dataset.flat_map(of_ranks)

    def of_process(self, dataset_fn: Callable[[Any], Any], _: Any) -> Any:
        """Makes a process' data set, as long as all others'."""
        place = process_count(), process_index()
        count = self._strategy.communicator.size
        dataset = dataset_fn(tf.distribute.InputContext(*place, count))
        what = "strategy.distribute_datasets_from_function"
        lengths = all_gather_json(what, int(dataset.cardinality()))
        known = {*lengths} - {tf.data.UNKNOWN_CARDINALITY}
        if len(known) > 1:
            listed = ", ".join(
                f"{'endless' if length < 0 else length} in process {index}"
                for index, length in enumerate(lengths)
            )
            least = min(each for each in known if each >= 0)
            message = (
                f"{what}: the datasets have different numbers of batches, and "
                "a process at the end of its own would leave others waiting: "
                f"{listed}. Write `dataset.take({least})`, or draw as many in "
                "each process from `dataset.repeat()`."
            )
            raise of_all_processes(ReplicaMismatchError(message))
        return dataset
