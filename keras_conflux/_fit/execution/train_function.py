"""The functions that Keras' loops call for one or several batches."""

import collections
import itertools
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import StepTimeoutError
from keras_conflux._common.trees import Tree
from keras_conflux._fit.execution import replica_step
from keras_conflux._fit.execution.graph_program import GraphProgram
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import Splitter
from keras_conflux._fit.input.batches import Stack
from keras_conflux._fit.input.epoch_iterator import Chunk
from keras_conflux._replication import state
from keras_conflux._replication import synchronization
from keras_conflux._replication.strategy import ReplicatedStrategy


def make_function(
    model: keras.Model, strategy: ReplicatedStrategy, step: Callable
) -> Callable[[Any], dict]:
    """Makes Keras' `train_function` or `test_function`.

    Args:
        model: A replicated model.
        strategy: What replicates it.
        step: `model.train_step` or `model.test_step`.

    Returns:
        A function that takes a `Chunk`, or an iterator over global batches of
        which it draws `model.steps_per_execution`, and returns the logs.
    """
    run = _Runner(model, strategy, replica_step.Step(model, step))
    several = model.steps_per_execution

    def function(iterator: Any) -> dict:
        if isinstance(iterator, Chunk):
            return run(iterator)
        drawn = [next(iterator), *itertools.islice(iterator, several - 1)]
        spec = getattr(iterator, "element_spec", None)
        return run(Chunk(run.split(drawn, spec), several))

    return function


def make_predict_function(
    model: keras.Model, strategy: ReplicatedStrategy
) -> Callable[[list[Tree]], Tree]:
    """Makes Keras' `predict_function`, of a list of global batches."""
    run = _Runner(model, strategy, replica_step.Prediction(model))

    def function(drawn: list[Any]) -> Tree:
        outputs = []
        for each in drawn:
            ready = isinstance(each, Batch)
            for piece in [each] if ready else run.split([each]):
                one = piece.singles() if isinstance(piece, Stack) else [piece]
                outputs.extend(run(Chunk([batch], 1)) for batch in one)
        return replica_step.joined(outputs)

    return function


def compiles(model: keras.Model, strategy: ReplicatedStrategy) -> bool:
    """Whether XLA compiles what the replicas of a model do."""
    eager = model.run_eagerly or tf.config.functions_run_eagerly()
    return bool(
        model.jit_compile and not eager and strategy.communicator.takes_xla
    )


class _Runner:
    """Runs batches through XLA where it can, else through a graph."""

    def __init__(
        self,
        model: keras.Model,
        strategy: ReplicatedStrategy,
        replicas_do: replica_step.Work,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._graph = GraphProgram(replicas_do, strategy, model.run_eagerly)
        self._xla = XlaProgram(replicas_do, strategy, model.steps_per_execution)
        self._may_compile = compiles(model, strategy)
        self.split = Splitter(strategy, stacks=self._may_compile)
        self._is_first = True
        self._compiled: set[Any] = set()
        self._compiling_took = 0.0
        self._graph_took: dict[Any, float] = collections.defaultdict(float)

    def __call__(self, chunk: Chunk) -> Tree:
        with self._strategy.communicator.lock:
            try:
                result = None
                for piece in chunk.pieces:
                    result = self._run(piece, chunk.limit)
                return result
            except StepTimeoutError:
                raise  # a program still runs; whatever else would wait for it
            except BaseException:
                # Replicas have stopped at different places.
                self._strategy.communicator.recover()
                synchronization.synchronize(self._model)
                raise

    def _run(self, piece: Batch | Stack, limit: int) -> Tree:
        if not isinstance(piece, Stack):
            return self._graph([piece])
        began = time.monotonic()
        shape = piece.shape
        if not self._is_worth_compiling(shape):
            result = self._graph(piece)
            self._graph_took[shape] += time.monotonic() - began
            return result
        try:
            result = self._xla(piece, limit)
        except tf.errors.OpError as error:
            if shape in self._compiled or not _is_of_compiler(error):
                raise
            self._may_compile = False
            warnings.warn(
                f"{self._model.name}: XLA cannot compile this model, so it "
                "runs as a plain graph, which is slower. Compile it with "
                "`jit_compile=False` to say so. XLA's reason: "
                f"{_reason(error)}",
                stacklevel=2,
            )
            self._strategy.communicator.recover()
            return self._graph(piece)
        if not self._compiled:
            self._compiling_took = time.monotonic() - began
        self._compiled.add(shape)
        return result

    def _is_worth_compiling(self, shape: Any) -> bool:
        """Whether to compile for a shape: the last batch's may come rarely.

        The first one is; another one when it has cost as much without.
        """
        first, self._is_first = self._is_first, False
        if not self._may_compile or (first and not _is_built(self._model)):
            return False
        if shape in self._compiled or not self._compiled:
            return True
        return self._graph_took[shape] > self._compiling_took


def _is_built(model: keras.Model) -> bool:
    """Whether a step makes no variables, which XLA programs cannot.

    A model without `call` is never built itself.
    """
    return all(
        owner.built
        for owner in state.owners(model)
        if isinstance(owner, keras.layers.Layer | keras.optimizers.Optimizer)
        and not isinstance(owner, keras.Model)
    )


_SIGNS = ("XLA", "compil")


def _is_of_compiler(error: tf.errors.OpError) -> bool:
    kinds = tf.errors.InvalidArgumentError | tf.errors.UnimplementedError
    return isinstance(error, kinds) and any(s in str(error) for s in _SIGNS)


_NOISE = re.compile(
    r"Graph execution error|Detected at node|File |\d+ root error|"
    r"Stack trace for|<stack traces|The op is created|tf2xla |$"
)


def _reason(error: tf.errors.OpError) -> str:
    """What TensorFlow's message says besides where the op was made."""
    lines = [
        re.sub(r"^\(\d\) \w+: +|{{.*?}}|\[\[.*?\]\]", "", line.strip()).strip()
        for line in str(error.message).splitlines()
    ]
    telling = [line for line in lines if not _NOISE.match(line)]
    return " ".join(dict.fromkeys(telling))[:500]
