"""A replica runs its part of a batch in turns: one for each microbatch.

A turn is a replica more, in time and not in space. So all that makes replicas
equal to one device makes turns equal as well: the step is traced for one turn,
and turns exchange values as replicas would. `graph_in_turns.py` runs the trace.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._communication.transports.ops import SUM
from keras_conflux._communication.transports.ops import Op
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._fit.execution import graph_in_turns
from keras_conflux._fit.execution.graph_in_turns import TracedTurn
from keras_conflux._fit.input import specs
from keras_conflux._fit.input.device_batches import batch_fractions
from keras_conflux._replication import combinations
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Place


class TracedTurns:
    """The turns of a replica, while one of them is traced.

    It serves the trace of one as a communicator serves a replica.
    """

    spans_processes = False
    joins_buckets = False

    def __init__(
        self, name: str, count: int, device_fraction: Any, compiled: bool
    ) -> None:
        self._name = name
        self._count = count
        self.device_fraction = device_fraction
        """The replica's samples over the samples of the global batch."""
        self.rank: Any = None
        """The position among the turns of all replicas, a tensor."""
        collectives = replica_collectives()
        self.size = collectives.count * count
        self.on_gpu = collectives.on_gpu or compiled  # rows are added up
        self.cuts: list[graph_in_turns.Cut] = []
        self._graph: Any = None

    @property
    def is_first_here(self) -> tf.Tensor:
        """Whether it is the first turn of its replica."""
        return self.rank % self._count == 0

    def begin(self, rank: tf.Tensor) -> None:
        """Marks the trace of a turn in the current graph."""
        self.rank = rank
        self.cuts = []
        self._graph = tf.compat.v1.get_default_graph()

    def rank_as_constant(self, _: int) -> tf.Tensor:
        """Returns the rank, which is no constant."""
        return self.rank

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, in_xla: bool = False
    ) -> tf.Tensor:
        """See `Communicator`."""
        return self._cut(tensor, op)

    def summed_here(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the turns of this replica."""
        return self._cut(tensor, SUM, stays_here=True)

    def assert_same_call(self, *_: Any) -> None:
        """Does nothing: all turns run one trace."""

    def can_gather_again(self, _: bool) -> bool:
        """Returns that nothing lies in parts."""
        return False

    def _cut(
        self, tensor: tf.Tensor, op: Op, stays_here: bool = False
    ) -> tf.Tensor:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise NotImplementedError(
                f"{self._name}: a step with `microbatches=` exchanges "
                "something in a branch, a loop or a function, where a turn "
                "cannot wait for the others. Compute it outside of that, or "
                "leave out `microbatches`."
            )
        value = tf.identity(tensor)
        step = steps.current()
        if step is not None and step.kinds is not None:
            step.kinds.mark_equal([value])
        self.cuts.append(graph_in_turns.Cut(value, op, stays_here))
        return value


def run_in_turns(
    name: str,
    count: int,
    trace: Callable,
    shard: trees.Tree,
    fraction: Any,
    place: Callable[[], Place],
    size: Any,
    compiled: steps.CompiledStep | None = None,
) -> trees.Tree:
    """Runs a replica's step, which `trace` traces for a turn, in turns.

    See `ReplicaStep.on_replica`.
    """
    leaves = trees.present(shard)
    strategy: Any = tf.distribute.get_strategy()
    refused = combinations.refusal(getattr(strategy, "shard", None), count)
    if refused:
        raise NotImplementedError(f"{name}: {refused}")
    turns = TracedTurns(name, count, fraction, compiled is not None)
    step = steps.Step(name, compiled=compiled)
    with steps.entered(step):
        if compiled is None:
            arguments = _Uneven(count, leaves, place(), size)
        else:
            arguments = _Even(count, leaves, compiled, turns.size)
    structures: list[trees.Tree] = []
    index, communicator = replica_index(), strategy.communicator
    before = communicator.called(index)

    def turn(*given: Any) -> list[tf.Tensor]:
        # TensorFlow traces a function again that has made variables.
        communicator.forget_since(index, before)
        own, numbers = given[: len(leaves)], given[len(leaves) :]
        turns.begin(numbers[0])
        output = trace(
            trees.refill(shard, own),
            *arguments.known_from(numbers),
            arguments.compiled,
            turns,
        )
        structures.append(output)
        return trees.present(output)

    signature = [specs.spec_of_any(leaf) for leaf in leaves]
    signature += arguments.signature
    # It holds its graph.
    traced = tf.function(
        tf.autograph.experimental.do_not_convert(turn)
    ).get_concrete_function(*signature)
    graph = traced.graph
    flat = tf.nest.flatten(signature, expand_composites=True)
    given = graph.inputs[: len(flat)]
    try:
        with steps.entered(step):
            outputs = graph_in_turns.run(
                TracedTurn(graph, given, turns.cuts, graph.outputs),
                count,
                arguments,
                replica_collectives().all_reduce,
                compiled is not None,
            )
    except graph_in_turns.CannotRunInTurns as error:
        operation, reason = error.args
        raise NotImplementedError(
            f"{name}: with `microbatches=` a replica runs a step in turns, "
            f"and {operation.name} ({operation.type}) {reason}."
        ) from error
    return trees.refill(structures[-1], outputs)


class _Even:
    """The arguments of turns that divide a part evenly, in XLA programs."""

    def __init__(
        self,
        count: int,
        leaves: Sequence[Any],
        compiled: steps.CompiledStep,
        everywhere: int,
    ) -> None:
        self._everywhere = everywhere
        self._first = tf.cast(rank_as_tensor(), tf.int32) * count
        self._stacked = [_stacked(leaf, count) for leaf in leaves]
        shapes = compiled.shapes
        if shapes is not None:
            shapes = [[x[0] // count, *x[1:]] if len(x) else x for x in shapes]
        self.compiled = steps.CompiledStep(shapes, compiled.rank)
        self.signature = [tf.TensorSpec([], tf.int32)]

    def __call__(self, number: tf.Tensor) -> list[tf.Tensor]:
        """Returns the arguments of a turn."""
        own = [x[number] if x.shape.rank else x for x in self._stacked]
        return [*own, self._first + tf.cast(number, tf.int32)]

    def known_from(self, numbers: Sequence[tf.Tensor]) -> tuple:
        """Returns one turn's arguments of `on_replica`, besides the shard."""
        (rank,) = numbers
        count = self._everywhere
        fraction = batch_fractions([1] * count)[0]
        return fraction, lambda: Place(1, tf.cast(rank, tf.uint64), count), None


def _stacked(leaf: tf.Tensor, count: int) -> tf.Tensor:
    """Returns rows stacked by turns, or a number as it is."""
    if leaf.shape.rank == 0:
        return leaf
    shape = tf.shape(leaf)
    sizes = [count, shape[0] // count]
    stacked = tf.reshape(leaf, tf.concat([sizes, shape[1:]], 0))
    stacked.set_shape([count, None, *leaf.shape[1:]])
    return stacked


class _Uneven:
    """The arguments of turns for a part of any number of samples, also none."""

    compiled = None

    def __init__(
        self, count: int, leaves: Sequence[Any], place: Place, size: Any
    ) -> None:
        self._count = count
        self._leaves = leaves
        self._place = place
        self._size = tf.cast(place.own if size is None else size, tf.int64)
        self._first = tf.cast(rank_as_tensor(), tf.int32) * count
        self._float = batch_fractions([1])[0].dtype
        place_of = (tf.uint64,) * 3
        self.signature = [
            tf.TensorSpec([], dtype)
            for dtype in (tf.int32, self._float, *place_of, tf.int64)
        ]

    def __call__(self, number: tf.Tensor) -> list[tf.Tensor]:
        """Returns the arguments of a turn."""
        own = [
            rows.shard_of(leaf, number, self._count, at_least_one=True)
            for leaf in self._leaves
        ]
        begin, end = rows.bounds(self._size, number, self._count)
        size, place = end - begin, self._place
        fraction = tf.math.divide_no_nan(
            tf.cast(size, self._float), tf.cast(place.total, self._float)
        )
        numbers = [
            self._first + tf.cast(number, tf.int32),
            fraction,
            tf.cast(tf.maximum(size, 1), tf.uint64),
            tf.cast(place.before, tf.uint64) + tf.cast(begin, tf.uint64),
            tf.cast(place.total, tf.uint64),
            size,
        ]
        return tf.nest.flatten([*own, *numbers], expand_composites=True)

    def known_from(self, numbers: Sequence[tf.Tensor]) -> tuple:
        """Returns one turn's arguments of `on_replica`, besides the shard."""
        _, fraction, own, before, total, size = numbers
        return fraction, functools.partial(Place, own, before, total), size
