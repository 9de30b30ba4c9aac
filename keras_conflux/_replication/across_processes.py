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
from keras_conflux._communication.tree_collectives import ReplicaCollectives
from keras_conflux._compat import cross_device
from keras_conflux._compat import per_replica
from keras_conflux._compat import tensorflow_internals

_Runner = Callable[[Callable[..., Any], Any], Callable[..., Any]]
_runners: list[_Runner] = []


def run_everywhere_by(runner: _Runner) -> None:
    """Sets the runner of functions on every device, outside of replicas.

    Args:
        runner: Takes the function and the strategy whose devices these are.
    """
    _runners.append(runner)


def run_everywhere(
    function: Callable[..., Any], strategy: Any
) -> Callable[..., Any]:
    """Returns a function that runs one on every device."""
    convert = tf.autograph.experimental.do_not_convert
    return _runners[-1](convert(function), strategy)


class AcrossProcesses(tf.distribute.CrossDeviceOps):
    """TensorFlow's reductions, of values on the replicas of all processes.

    Args:
        strategy: The strategy of the replicas.
        collectives: Returns the collectives of the running replica.
    """

    def __init__(
        self, strategy: Any, collectives: Callable[[], ReplicaCollectives]
    ) -> None:
        super().__init__()
        self.first_rank: int = strategy.communicator.rank(0)
        self.count: int = strategy.communicator.size
        """The number of replicas of all processes."""
        self._devices = strategy.devices
        self._strategy = strategy
        self._collectives = collectives
        self._compiled = functools.cache(self._compile)

    @property
    def _num_between_graph_workers(self) -> int:
        return process_count()

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, _: Any
    ) -> Any:
        found = self._on_each("reduce", None, per_replica_value)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            found = cross_device.mean_of(found, self.count)
        return cross_device.placed(found, per_replica_value, destinations)

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        return [
            self.reduce_implementation(reduce_op, value, to, options)
            for value, to in value_destination_pairs
        ]

    def _gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, _: Any
    ) -> Any:
        found = self._on_each("gather", axis, per_replica_value)
        return cross_device.placed(found, per_replica_value, destinations)

    def _on_each(self, name: str, axis: int | None, value: Any) -> list[Any]:
        """Returns on each device the sum over all replicas, or what they have.

        Args:
            name: Of the method of the strategy.
            axis: Along which it is joined. `None` for the sum.
            value: That of the replicas here.
        """
        parts = cross_device.as_tensors(value)
        if tf.executing_eagerly():
            # One function for several ranks would be traced for unknown ones,
            # which cannot be joined.
            dense = getattr(parts[0], "values", parts[0])
            rank = dense.shape.rank
            run = self._compiled(name, axis, rank)
            return [*run(per_replica.of(parts))]
        found: dict[int, Any] = {}

        @tf.autograph.experimental.do_not_convert
        def one_replica() -> None:
            index = tensorflow_internals.replica_index()
            found[index] = self._reduced(axis, parts[index])

        self._strategy.run(one_replica)
        return [found[index] for index in range(len(parts))]

    def _compile(
        self, name: str, axis: int | None, rank: int
    ) -> Callable[..., Any]:
        del rank

        def reduced(part: Any) -> Any:
            return self._reduced(axis, part)

        reduced.__qualname__ = f"strategy.{name}"
        return run_everywhere(reduced, self._strategy)

    def _reduced(self, axis: int | None, part: Any) -> Any:
        this = self._collectives()
        if axis is None:
            return this.all_reduce("sum", part)
        return this.all_gather(part, axis)

    def shards(self, dataset: Any) -> Any:
        """Returns a data set of the shards of each batch for replicas here.

        All processes draw all batches, as they do for `fit`, and so equally
        many.
        """
        policies = tf.data.experimental.AutoShardPolicy
        given = dataset.options().experimental_distribute.auto_shard_policy
        if given not in (policies.AUTO, policies.DATA):
            raise NotImplementedError(
                "All processes draw the same batches from a dataset, and each "
                f"takes its rows. Received: {given}. Where each is to read its "
                "own files, write "
                "`strategy.distribute_datasets_from_function`."
            )
        here = range(self.first_rank, self.first_rank + len(self._devices))

        def of_ranks(*batch: Any) -> Any:
            whole = batch if len(batch) > 1 else next(iter(batch))
            parts = [rows.shard_of(whole, rank, self.count) for rank in here]
            datasets = map(tf.data.Dataset.from_tensors, parts)
            return functools.reduce(tf.data.Dataset.concatenate, datasets)

        return dataset.flat_map(of_ranks)

    def of_process(self, dataset_fn: Callable[[Any], Any], _: Any) -> Any:
        """Returns the data set that a function makes for this process.

        Raises:
            ReplicaMismatchError: If data sets of processes are known to be of
                different lengths.
        """
        count, index = process_count(), process_index()
        context = tf.distribute.InputContext(count, index, self.count)
        dataset = dataset_fn(context)
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
