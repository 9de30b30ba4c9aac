"""How one call of `fit`, `evaluate` or `predict` is cut into executions."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._common.contexts import Setting
from keras_conflux._compat import keras_models
from keras_conflux._fit.input.batch_sharder import BatchSharder
from keras_conflux._fit.input.batch_sharder import WholeBatchSharder
from keras_conflux._fit.input.calls import may_steer_data
from keras_conflux._fit.input.calls import needs_every_batch
from keras_conflux._fit.input.local_batches import LocalSharder
from keras_conflux._fit.input.measurements import Measurements
from keras_conflux._replication import model_options
from keras_conflux._replication.strategy import ReplicatedStrategy


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """Decided once per call, and followed by all of its epoch iterators."""

    strategy: ReplicatedStrategy
    compiled: bool
    """Whether XLA compiles the steps. Batches are stacked for it."""
    eager: bool = False
    """Whether the steps run without a graph, on whole batches."""
    name: str = "a model"
    """The name of the call, for messages between processes."""
    is_local: bool = False
    """Whether each process brings its own part of the batches."""
    turns: int = 1
    """The number of parts in which each replica runs its part of a batch."""
    reshuffles: bool = False
    """Whether arrays are shuffled in another order in each epoch."""
    chooses_steps: bool = False
    """Whether an execution may run more steps than the user has asked for."""
    drawn_by_keras: bool = False
    """See `StepGroup`."""
    steered: bool = False
    """Whether a callback may choose the next batch of Python code."""
    is_ending: Callable[[], bool] = lambda: False
    """Whether the next execution is to be the last."""
    at_epoch_end: Callable[[], None] = lambda: None
    """Called after the last step of an epoch."""
    drawing: contextlib.ExitStack = dataclasses.field(
        default_factory=contextlib.ExitStack
    )
    """Ends the drawing of the epochs' batches, which Keras may leave half-way.
    """
    measurements: Measurements = dataclasses.field(default_factory=Measurements)
    """The measurements of this call's executions."""

    @classmethod
    def of(
        cls, model: keras.Model, strategy: ReplicatedStrategy
    ) -> "ExecutionPlan":
        """Returns a plan of as many steps as the user has asked for."""
        return cls(
            strategy,
            compiles(model, strategy),
            _runs_on_whole_batches(model, strategy),
            model.name,
            model_options.reads_own_part(model),
            model_options.microbatches_of(model),
            drawn_by_keras=True,
        )

    @classmethod
    def of_fit(
        cls,
        model: keras.Model,
        strategy: ReplicatedStrategy,
        callbacks: list[Any],
    ) -> "ExecutionPlan":
        """Returns a plan of many steps per execution, if no callback minds."""
        plan = cls.of(model, strategy)
        chooses = plan.compiled and not any(map(needs_every_batch, callbacks))
        if strategy.communicator.spans_processes:
            chooses = chooses and not plan.is_local
            chooses = all(all_gather_json(f"steps of {model.name}", chooses))
        weakly = weakref.ref(model)  # which holds the iterators that follow it
        return dataclasses.replace(
            plan,
            reshuffles=model_options.reshuffles(model),
            chooses_steps=chooses,
            drawn_by_keras=False,
            steered=any(map(may_steer_data, callbacks)),
            is_ending=lambda: getattr(weakly(), "stop_training", False),
        )

    def sharder(self) -> BatchSharder:
        """Returns the sharder of the batches of one source of data."""
        if self.eager:
            return WholeBatchSharder(self.strategy)
        if self.is_local:
            given = self.strategy, self.compiled, self.name
            return LocalSharder(*given, self.drawn_by_keras)
        # One device is given such batches one by one, and sees their shapes.
        return BatchSharder(
            self.strategy, self.compiled, self.drawn_by_keras, self.turns
        )


def compiles(model: keras.Model, strategy: ReplicatedStrategy) -> bool:
    """Whether XLA compiles the steps of a model's replicas."""
    supports_xla = strategy.communicator.supports_xla
    return supports_xla and keras_models.is_compiled(model)


def _runs_on_whole_batches(
    model: keras.Model, strategy: ReplicatedStrategy
) -> bool:
    eager = keras_models.runs_eagerly(model)
    spans_processes = strategy.communicator.spans_processes
    if eager and spans_processes and model_options.reads_own_part(model):
        raise NotImplementedError(
            f"{model.name}: with `run_eagerly=True` a step runs once, on the "
            'whole batch, of which each process has a part with data="local". '
            "Run it in one process, give all processes the same data with "
            '`keras_conflux.replicate(model, data="global")`, or leave out '
            "`run_eagerly=True`."
        )
    return eager


# Keras makes epoch iterators without saying for which model.
_current: Setting[ExecutionPlan | None] = Setting(None)
current_plan = _current.get
"""Returns the plan of the call that runs in this thread, if one does."""


def measured(
    model: keras.Model,
) -> tuple[Measurements, ReplicatedStrategy] | None:
    """Returns the measurements of the running `fit`, and its strategy.

    It is `None` if Keras' own loop runs the steps, without replicas.
    """
    plan = current_plan()
    if plan is None or plan.strategy is not keras_models.strategy_of(model):
        return None
    return plan.measurements, plan.strategy


@contextlib.contextmanager
def use_plan(plan: ExecutionPlan) -> Iterator[None]:
    """Gives a plan to the epoch iterators that are made here."""
    with plan.drawing, _current.to(plan):
        yield
