"""Runs the steps of an execution through XLA where it can, else as a graph."""

import collections
import time
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import StepTimeoutError
from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import error_texts
from keras_conflux._fit.execution.graph_program import GraphProgram
from keras_conflux._fit.execution.replica_step import ReplicaStep
from keras_conflux._fit.execution.watchdog import StepAbandoned
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import StackedBatch
from keras_conflux._fit.input.batches import StepGroup
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._replication import state
from keras_conflux._replication import synchronization


class StepExecutor:
    """Runs the batches of a step group and returns the last one's result.

    Args:
        model: A replicated model.
        plan: Says what replicates it, and whether XLA compiles its steps.
        step: What each replica does.
    """

    def __init__(
        self, model: keras.Model, plan: ExecutionPlan, step: ReplicaStep
    ) -> None:
        self._model = model
        self._strategy = plan.strategy
        self._graph = GraphProgram(step, plan.strategy, model.run_eagerly)
        self._xla = XlaProgram(step, plan.strategy, model.steps_per_execution)
        self._may_compile = plan.compiled
        self._is_first = True
        self._compiled: set[Any] = set()
        self._compile_seconds = 0.0
        self._graph_seconds: dict[Any, float] = collections.defaultdict(float)

    def __call__(self, group: StepGroup) -> Tree:
        with self._strategy.communicator.lock:
            try:
                result = None
                for batch in group.batches:
                    result = self._run(batch, group.limit)
                return result
            except (StepTimeoutError, StepAbandoned):
                raise  # a program still runs; all else would wait for it
            except BaseException:
                # Replicas have stopped at different places.
                self._strategy.communicator.recover()
                synchronization.synchronize(self._model)
                raise

    def _run(self, batch: Batch | StackedBatch, limit: int) -> Tree:
        if not isinstance(batch, StackedBatch):
            return self._graph([batch])
        began = time.monotonic()
        shape = batch.shape
        if not self._is_worth_compiling(shape):
            result = self._graph(batch)
            self._graph_seconds[shape] += time.monotonic() - began
            return result
        try:
            result = self._xla(batch, limit)
        except tf.errors.OpError as error:
            if shape in self._compiled or not error_texts.is_of_compiler(error):
                raise
            self._may_compile = False
            warn(
                f"{self._model.name}: XLA cannot compile this model, so it "
                "runs as a plain graph, which is slower. Compile it with "
                "`jit_compile=False` to say so. XLA's reason: "
                f"{error_texts.compiler_reason(error)}"
            )
            self._strategy.communicator.recover()
            return self._graph(batch)
        if not self._compiled:
            self._compile_seconds = time.monotonic() - began
        self._compiled.add(shape)
        return result

    def _is_worth_compiling(self, shape: Any) -> bool:
        """Whether to compile for a shape: the last batch's may come rarely.

        The first shape is compiled. Another one is when the time that it has
        taken as a graph exceeds what the first compilation took.
        """
        first, self._is_first = self._is_first, False
        if not self._may_compile or (first and not _is_built(self._model)):
            return False
        if shape in self._compiled or not self._compiled:
            return True
        return self._graph_seconds[shape] > self._compile_seconds


def _is_built(model: keras.Model) -> bool:
    """Whether a step makes no variables, which XLA programs cannot.

    A model without `call` is never built itself.
    """
    return all(
        owner.built
        for owner in state.stateful_objects(model)
        if isinstance(owner, keras.layers.Layer | keras.optimizers.Optimizer)
        and not isinstance(owner, keras.Model)
    )
