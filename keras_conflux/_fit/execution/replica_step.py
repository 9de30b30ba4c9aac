"""What each replica does with its shard of a batch, and the common result."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._data import rows
from keras_conflux._fit.global_batch import kinds
from keras_conflux._fit.global_batch.analysis import BatchKinds
from keras_conflux._fit.global_batch.gathered_rows import gathered
from keras_conflux._fit.input import specs
from keras_conflux._fit.numerics import branches
from keras_conflux._fit.numerics import layer_state
from keras_conflux._fit.numerics import logs
from keras_conflux._fit.numerics import metric_sums
from keras_conflux._fit.numerics import places
from keras_conflux._fit.numerics import plain_variables
from keras_conflux._fit.numerics import trace_findings
from keras_conflux._replication import state
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import Place
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import replica_index


@dataclasses.dataclass(frozen=True)
class InXla:
    """What is known of a step that XLA compiles."""

    shapes: Sequence[Sequence[int]]
    """The shapes of the leaves of the shard."""
    rank: Any
    """The variable that holds the position of each replica among all, if there
    are several."""


class ReplicaStep(Protocol):
    """One step of all replicas."""

    name: str
    """What a warning calls it."""
    identity: str
    """What is the same in each process that makes the same step."""
    tracing: threading.RLock
    """Held by the thread that traces the step. Others may ask at once, as when
    each replica of another model wants predictions."""

    def on_whole_batch(self, batch: Tree) -> Tree:
        """Runs the step of one device, for which nothing has to be known."""
        ...

    def before_steps(self) -> None:
        """Does what goes before one or many steps. Traced once per replica."""
        ...

    def on_replica(
        self,
        shard: Tree,
        fraction: Any,
        place: Callable[[], Place],
        size: Any,
        compiled: InXla | None = None,
    ) -> Tree:
        """Runs a replica's step. Traced once per replica, in replica order.

        Replicas of a compiled step may share a trace, that of replica 0.

        Args:
            shard: The replica's shard of the global batch.
            fraction: A scalar: its number of samples over the global batch's.
            place: Returns where they are in the global batch.
            size: Its number of samples, which may be 0; `None` if it cannot.
            compiled: What is known of the XLA program that what is traced
                becomes part of, if it does.
        """
        ...

    def after_steps(self, fraction: Any) -> None:
        """Does what once after many steps of the same fraction will do.

        Traced once per replica, after `on_replica`.
        """
        ...

    def assert_traced_rightly(self) -> None:
        """Raises `TraceAgain` if the traces of all replicas were in vain."""
        ...

    def merge(self, outputs: list[Tree], fractions: list, sizes: list) -> Tree:
        """Makes one result of what the replicas returned."""
        ...


class _ModelStep:
    """Runs a step of a model, and makes what its layers keep equal."""

    def __init__(self, model: keras.Model) -> None:
        self.name = model.name
        self.identity = f"{type(self).__name__} of {model.name}"
        self.tracing = threading.RLock()
        self._model = model
        self._contexts: dict[int, StepContext] = {}
        self._warned: set[str] = set()

    def before_steps(self) -> None:
        """See `ReplicaStep`."""
        metric_sums.take_apart(self._model)

    def on_replica(
        self,
        shard: Tree,
        fraction: Any,
        place: Callable[[], Place],
        size: Any,
        compiled: InXla | None = None,
    ) -> Tree:
        """See `ReplicaStep`."""
        fraction = tf.identity(fraction)  # a tensor of the step's own graph
        context = StepContext(
            self.name,
            warned=self._warned,
            in_xla=compiled is not None,
            compiled_shapes=compiled and compiled.shapes,
            rank=compiled and compiled.rank,
            batch_fraction=fraction,
            place=place,
            may_be_empty=size is not None,
            shard=shard,
            graph=tf.compat.v1.get_default_graph(),
            kinds=BatchKinds(
                trees.present(shard),
                [fraction] if size is None else [fraction, size],
                functools.partial(_handles_of_sums, self._model),
                is_blind=specs.sizes_are_known(shard),
            ),
            is_counter_of_keras=_CountersOfKeras(self._model),
        )
        if replica_index() == 0:
            self._contexts.clear()  # replicas may share this trace
        self._contexts[replica_index()] = context
        with step_context.entered(context):
            places.write(context)
            output = self._run(shard, size, context)
            context.internal = True
            layer_state.reduce_states(context)
            branches.assert_chosen_together(context)
            plain_variables.warn_of_plain_variables(self._model, context)
        return output

    def assert_traced_rightly(self) -> None:
        """See `ReplicaStep`."""
        trace_findings.assert_final(self._contexts.values())

    def _run(self, shard: Tree, size: Any, context: StepContext) -> Tree:
        raise NotImplementedError

    def after_steps(self, fraction: Any) -> None:
        """See `ReplicaStep`."""
        context = self._contexts[replica_index()]
        with step_context.entered(context):
            layer_state.average(context, fraction)
            metric_sums.put_together(self._model)


class TrainOrTestStep(_ModelStep):
    """A `train_step` or `test_step`, whose result is the logs."""

    def __init__(self, model: keras.Model, step: Callable) -> None:
        super().__init__(model)
        self.identity += f": {getattr(step, '__name__', '')}"
        self.on_whole_batch = step
        self._step = tensorflow_tracing.inlined(step)

    def _run(self, shard: Tree, size: Any, context: StepContext) -> Tree:
        with logs.noting_results(self._model, context) as noted:
            output = self._step(shard)
        context.results = logs.results_by_position(output, noted)
        return logs.made_global(output, context)

    def merge(self, outputs: list[Tree], fractions: list, sizes: list) -> Tree:
        """See `ReplicaStep`."""
        first = self._contexts[0]
        return logs.of_global_batch(outputs, fractions, sizes, first)


def _handles_of_sums(model: keras.Model) -> list[Any]:
    """Returns the handles of this replica's copies that add up to a value."""
    return [
        tensorflow_internals.handle_of(state.copies(v)[replica_index()])
        for v in state.sums_of(model)
    ]


class _CountersOfKeras:
    """Tells to which variables metrics of Keras add sums over samples."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._known: dict[int, bool] = {}

    def __call__(self, variable: keras.Variable) -> bool:
        if id(variable) not in self._known:  # a step may make metrics
            self._known = self._read()
        return self._known.setdefault(id(variable), False)

    def _read(self) -> dict[int, bool]:
        found: dict[int, bool] = {}
        for owner in state.stateful_objects(self._model):
            if isinstance(owner, keras.metrics.Metric):
                module = type(owner).update_state.__module__
                of_keras = module.startswith("keras.")
                # Keras holds those of one's own in a metric of its own.
                for key in map(id, owner.variables):
                    found[key] = of_keras and found.get(key, True)
        return found


class PredictStep(_ModelStep):
    """A `predict_step`, whose result is the outputs for the global batch.

    Args:
        model: What predicts.
        is_local: Whether a process wants the outputs for its own part alone.
    """

    def __init__(self, model: keras.Model, is_local: bool = False) -> None:
        super().__init__(model)
        self._is_local = is_local
        self._gathers = process_count() > 1 and not is_local

    def on_whole_batch(self, batch: Tree) -> Tree:
        """See `ReplicaStep`."""
        return self._model.predict_step(batch)

    def _run(self, shard: Tree, size: Any, context: StepContext) -> Tree:
        outputs = self._model.predict_step(shard)
        if self._is_local:
            return keras.tree.map_structure(
                lambda leaf: _mean_everywhere(leaf, context), outputs
            )
        if not self._gathers:
            return outputs
        return keras.tree.map_structure(
            lambda leaf: _everywhere(leaf, size, context), outputs
        )

    def merge(self, outputs: list[Tree], fractions: list, sizes: list) -> Tree:
        """See `ReplicaStep`."""
        if self._gathers:
            return outputs[0]
        if self._is_local:  # numbers for the batch are equal on all replicas
            fractions = [tf.constant(1.0), *map(tf.zeros_like, fractions[1:])]
        return keras.tree.map_structure(
            lambda *leaves: _of_global_batch(leaves, fractions, sizes), *outputs
        )


def _mean_everywhere(leaf: Any, context: StepContext) -> Any:
    """Returns what is no row of samples, but one number for the batch."""
    if leaf is None or leaf.shape.rank != 0:
        return leaf
    fraction = context.batch_fraction
    return replica_collectives().weighted_sum(leaf, fraction)


def _everywhere(leaf: Any, size: Any, context: StepContext) -> Any:
    """Returns what all replicas predict of the global batch, in each."""
    if leaf is None:
        return None
    if not isinstance(leaf, tf.Tensor):
        raise NotImplementedError(
            f"{context.name}: `predict` over several processes returns dense "
            f"tensors. Received: a {type(leaf).__name__}. Make it dense in "
            "`predict_step`."
        )
    if leaf.shape.rank == 0:
        return _mean_everywhere(leaf, context)
    context.kinds.mark(leaf, kinds.rows(0, regular=size is None))
    return gathered([leaf], context)[0].all


def _of_global_batch(leaves: tuple, fractions: list, sizes: list) -> Any:
    if leaves[0] is None:
        return None
    if leaves[0].shape.rank == 0:  # as of a metric, a mean over samples
        return logs.weighted_mean(leaves, fractions)
    # What a replica without samples predicted of its stand-in is dropped.
    return logs.joined_rows(leaves, sizes)


def joined(parts: list[Tree]) -> Tree:
    """Joins trees of tensors of shape `(batch, ...)` along the first axis."""
    return keras.tree.map_structure(lambda *leaves: rows.joined(leaves), *parts)
