"""Runs the steps of an execution by XLA, as a graph, or without one.

Once a model, it tells on which devices, and how.
"""

import collections
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import errors
from keras_conflux._common import trees
from keras_conflux._common.notices import tell
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import error_texts
from keras_conflux._compat import keras_models
from keras_conflux._devices.device import list_devices
from keras_conflux._devices.driver import cure
from keras_conflux._devices.driver import unseen
from keras_conflux._devices.driver import visible_gpus
from keras_conflux._fit.execution.graph_program import GraphProgram
from keras_conflux._fit.execution.replica_step import ReplicaStep
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux._fit.input.device_batches import Batch
from keras_conflux._fit.input.device_batches import StackedBatch
from keras_conflux._fit.input.device_batches import StepGroup
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.step_groups import not_the_end
from keras_conflux._fit.numerics.exit import TraceAgain
from keras_conflux._fit.numerics.warnings import warn_of_known_sizes
from keras_conflux._replication import promotion
from keras_conflux._replication import state
from keras_conflux._replication import synchronization
from keras_conflux._replication.common_state import agree_on_assigned
from keras_conflux._replication.replica_context import on_whole_batch
from keras_conflux._replication.replica_context import outside_of_strategies
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.watchdog import StepAbandoned

STEPS_AS_GRAPH = 100
"""How many steps of one more shape run as a graph before XLA compiles it: in so
many it gains about as much as a compilation takes."""
_told: Any = weakref.WeakKeyDictionary()
"""The strategy that has been told of, by model."""
_has_told_of_driver = False


class StepExecutor:
    """Runs the batches of a step group and returns the last one's result."""

    def __init__(
        self, model: keras.Model, plan: ExecutionPlan, step: ReplicaStep
    ) -> None:
        self._model = model
        self._plan = plan
        self._strategy = plan.strategy
        self._step = step
        if step.runs_in_turns and not plan.eager:
            step.turns = plan.turns
        self._graph = GraphProgram(step, plan.strategy)
        self._xla = XlaProgram(step, plan.strategy, model.steps_per_execution)
        self._may_compile = plan.compiled
        self._name = f"{step.of} of {model.name}"
        self._calls = 0
        self._needs_sizes: Exception | None = None
        self._compiled: set[Any] = set()
        self._steps_as_graph: collections.Counter[Any] = collections.Counter()

    def __call__(self, group: StepGroup) -> trees.Tree:
        name = self._name
        keeps = self._step.runs_in_turns and not self._plan.eager
        with (
            errors.with_notes(self._model, keeps),
            not_the_end(name, of_a_step=True),
            errors_reported_to_all(name),
        ):
            self._calls += 1
            # Another model may have taken the seeds since the last execution.
            promotion.promote_new_state(None, self._strategy)
            agree_on_assigned(
                f"execution {self._calls} of {name}", self._compared, group
            )
            for batch in group.batches[:1]:
                tell_what_runs(self._model, self._plan, batch.sizes)
            try:
                result = None
                for batch in group.batches:
                    with group.measurements.executing(
                        batch.steps,
                        batch.samples,
                        lambda: self._graph.count + self._xla.count,
                    ):
                        result = (
                            self._run_eagerly(batch)
                            if self._plan.eager
                            else self._run_with_retracing(batch, group.limit)
                        )
                promotion.give_back_seed()
                return result
            except (errors.StepTimeoutError, StepAbandoned):
                raise  # a program still runs; all else would wait for it
            except BaseException:
                if not self._strategy.communicator.spans_processes:
                    synchronization.synchronize(self._model)
                raise

    def _compared(self) -> list[keras.Variable]:
        """Returns what all processes hold alike between executions."""
        return [] if self._plan.eager else state.variables_of(self._model)

    def _run_eagerly(self, batch: Batch) -> trees.Tree:
        """Runs the step once, as one device does, on the whole batch."""
        (leaves,) = batch.shards
        data = trees.refill(batch.specs[0], leaves)

        def run() -> trees.Tree:
            with (
                on_whole_batch(self._strategy),
                tf.device(self._strategy.devices[0]),
            ):
                return self._step.on_whole_batch(data)

        return outside_of_strategies(run)

    def _run_with_retracing(self, batch: Batch, limit: int) -> trees.Tree:
        """Runs a step, traced again until nothing speaks against a trace."""
        needs = self._needs_sizes
        while True:
            try:
                result = self._run(batch if needs else batch.opened(), limit)
                if needs is not None and self._needs_sizes is None:
                    self._needs_sizes = needs
                    if self._strategy.communicator.size > 1:
                        warn_of_known_sizes(self._model, needs)
                return result
            except TraceAgain as again:
                found = again.findings
                if found.counted is not None:
                    self._refuse(found.counted, needs)
                if found.untracked:
                    state.adopt(self._model, found.untracked.values())
                    promotion.promote_new_state(self._model, self._strategy)
            except tf.errors.InvalidArgumentError as error:
                self._note_sizes(error, batch.sizes)
                raise
            except errors.ConfluxError:
                raise
            except (AttributeError, TypeError, ValueError) as error:
                is_open = needs or not batch.sizes_are_known
                if is_open or self._step.turns > 1:
                    self._note_sizes(error, batch.sizes)
                    raise
                needs = error

    def _refuse(self, counted: str, needs: Exception | None) -> None:
        raise errors.StrategyError(
            f"{self._model.name}: a step {counted}. A constant there "
            "may be the number of the samples of one replica, and the step "
            "cannot be traced for any number of samples: "
            f"{needs}. Write `keras.ops.shape(x)[0]` in place of "
            "`x.shape[0]`."
        ) from needs

    def _note_sizes(self, error: Exception, sizes: tuple[int, ...]) -> None:
        """Says how many samples a replica has, where this may be the cause."""
        if self._step.turns > 1 and not isinstance(error, tf.errors.OpError):
            error.add_note(
                f"{self._model.name}: with `microbatches` a step is traced for "
                "any number of samples. If it needs `x.shape[0]`, write "
                "`keras.ops.shape(x)[0]`, or leave out `microbatches`."
            )
        if len(sizes) > 1 and error_texts.is_of_sizes(error):
            error.add_note(
                f"{self._model.name}: a replica's step sees its part of the "
                f"batch: {', '.join(map(str, sizes))} of {sum(sizes)} samples "
                f"on {len(sizes)} replicas. Where the program has the size of "
                "the batch, write `keras.ops.shape(x)[0]`; where it picks "
                "samples by their place in the batch, pick them from "
                "`keras_conflux.allgather(x)`."
            )

    def _run(self, batch: Batch, limit: int) -> trees.Tree:
        if not isinstance(batch, StackedBatch):
            return self._graph(batch)
        shape = batch.shape
        if not self._is_worth_compiling(shape):
            self._steps_as_graph[shape] += batch.steps
            return self._graph(batch)
        try:
            result = self._xla(batch, limit)
        except tf.errors.OpError as error:
            compiles = shape in self._compiled
            if compiles or not error_texts.is_of_compiler(error):
                raise
            # A process that has compiled it would wait for this one.
            assert_same_place(f"{self._name}, which XLA cannot compile here")
            self._may_compile = False
            warn(
                f"{self._model.name}: XLA cannot compile this model, so it "
                "runs as a plain graph, which is slower. Compile it with "
                "`jit_compile=False` to say so. XLA's reason: "
                f"{error_texts.reason_of(error)}"
            )
            return self._graph(batch)
        self._compiled.add(shape)
        return result

    def _is_worth_compiling(self, shape: Any) -> bool:
        """Whether to compile: at once the first shape, others later."""
        first = not (self._compiled or self._steps_as_graph)
        if not self._may_compile or (first and not _is_built(self._model)):
            return False
        if self._strategy.communicator.spares_threads(self._name):
            return False
        if shape in self._compiled or not self._compiled:
            return True
        return self._steps_as_graph[shape] >= STEPS_AS_GRAPH


def _is_built(model: keras.Model) -> bool:
    """Whether a step makes no variables, which XLA programs cannot."""
    return keras_models.metrics_are_built(model) and all(
        owner.built
        for owner in state.stateful_objects(model, keras.layers.Layer)
        if not isinstance(owner, keras.Model)
    )


def tell_what_runs(
    model: keras.Model, plan: ExecutionPlan, sizes: Sequence[int]
) -> None:
    """Tells what runs, once for a model on its devices."""
    if _told.get(model) is plan.strategy or process_index() > 0:
        return
    _told[model] = plan.strategy
    how = "XLA" if plan.compiled else "without XLA"
    on_gpu = plan.strategy.communicator.on_gpu
    if model.jit_compile is True and not plan.compiled and not on_gpu:
        how = "without XLA, which is for one CPU device or GPUs"
    turns = plan.turns
    if plan.compiled and any(n % turns or n != sizes[0] for n in sizes):
        how = "without XLA where batches are uneven"
    if plan.eager:
        how = f"eagerly on {plan.strategy.devices[0]} alone"
        sizes = [sum(sizes)]
    parts = f", each in {turns} parts" * (turns > 1)
    tell(f"{_devices(plan.strategy)}, {how}, {_batches(sizes)}{parts}")
    if not on_gpu:
        _tell_of_driver()


def _devices(strategy: ReplicatedStrategy) -> str:
    used = len(strategy.devices)
    kind = strategy.devices[0].kind
    there = sum(device.kind == kind for device in list_devices())
    noun = "GPU" if kind == "GPU" else "CPU device"
    count = strategy.communicator.size
    processes = process_count()
    text = f"{count} {noun}{'s' * (count > 1)}"
    if processes > 1:
        text += f" in {processes} processes"
    if used == there:
        return text
    all_of_them = 'for all: kc.replicate(model, devices="all")'
    if processes == 1:
        return f"{used} of {there} {noun}s ({all_of_them})"
    return f"{text}, {used} of {there} in this one ({all_of_them})"


def _batches(sizes: Sequence[int]) -> str:
    total = sum(sizes)
    if len(sizes) == 1:
        return f"batches of {total}"
    groups = itertools.groupby(sizes)
    parts = [f"{len([*group])} x {size}" for size, group in groups]
    return f"batches of {total} = {' + '.join(parts)}"


def _tell_of_driver() -> None:
    """Tells, once, of GPUs that TensorFlow does not see, with the cure."""
    global _has_told_of_driver
    seen = len(tf.config.list_physical_devices("GPU"))
    if _has_told_of_driver or seen:
        return
    _has_told_of_driver = True
    wrong = unseen(len(visible_gpus(os.environ)), seen)
    if wrong:
        tell(f"{wrong}. Type: {cure(tf.test.is_built_with_cuda())}")
