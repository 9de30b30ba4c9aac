"""The functions that Keras' loops call for one or several batches."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._common import rows
from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_models
from keras_conflux._fit.execution import replica_step
from keras_conflux._fit.execution.step_executor import StepExecutor
from keras_conflux._fit.input.device_batches import Batch
from keras_conflux._fit.input.device_batches import StepGroup
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.specs import specs_of_whole
from keras_conflux._fit.input.step_groups import not_the_end
from keras_conflux._replication import model_options
from keras_conflux._replication import promotion
from keras_conflux._replication.replica_context import outside_of_replicas
from keras_conflux._replication.strategy import ReplicatedStrategy


def make_function(
    model: keras.Model, strategy: ReplicatedStrategy, step: Callable
) -> Callable[[Any], dict]:
    """Makes Keras' `train_function` or `test_function`.

    It takes a `StepGroup`, or an iterator over global batches of which it draws
    `model.steps_per_execution`, and returns the logs.
    """
    plan = ExecutionPlan.of(model, strategy)
    run = StepExecutor(model, plan, replica_step.TrainOrTestStep(model, step))
    shard = plan.sharder()
    several = model.steps_per_execution

    def function(iterator: Any) -> dict:
        if isinstance(iterator, StepGroup):
            return run(iterator)
        drawn = [next(iterator), *itertools.islice(iterator, several - 1)]
        spec = getattr(iterator, "element_spec", None)
        with errors_reported_to_all(f"a batch of {plan.name}"):
            batches = shard.join(shard(drawn, spec))
            return run(StepGroup(batches, several))

    _plans[function] = plan
    return function


def make_predict_function(
    model: keras.Model, strategy: ReplicatedStrategy
) -> Callable[[list[Tree]], Tree]:
    """Makes Keras' `predict_function`, of a list of global batches."""
    plan = ExecutionPlan.of(model, strategy)
    step = replica_step.PredictStep(model, plan.is_local)
    run = StepExecutor(model, plan, step)
    shard = plan.sharder()

    def sharded(batch: Any) -> list[Batch]:
        if isinstance(batch, Batch):
            return [batch]
        return shard.join(shard([batch]))

    has_built = plan.eager  # which its first step does

    def build(batch: Batch) -> None:
        # Once, as some layers are never built.
        nonlocal has_built
        with step.tracing:
            if not has_built and not keras_models.layers_are_built(model):
                spec = specs_of_whole(batch.specs[0], len(batch.sizes))
                promotion.build(model, spec, strategy, layers_alone=True)
            has_built = True

    def execute(drawn: list[Any]) -> Tree:
        outputs = []
        what = f"a batch of {plan.name}"
        with not_the_end(what, of_a_step=True), errors_reported_to_all(what):
            for batch in itertools.chain.from_iterable(map(sharded, drawn)):
                build(batch)
                outputs.append(run(StepGroup([batch], 1)))
        return keras.tree.map_structure(lambda *x: rows.joined(x), *outputs)

    def function(drawn: list[Any]) -> Tree:
        return outside_of_replicas(lambda: execute(drawn))

    _plans[function] = plan
    return function


_plans: Any = weakref.WeakKeyDictionary()
"""By function that is made here, the plan that it was made for."""


def is_of_other_mode(function: Any, model: keras.Model) -> bool:
    """Whether a function was made to run, or to read data, in another way."""
    plan = _plans.get(function) if function is not None else None
    return plan is not None and (
        plan.eager != keras_models.runs_eagerly(model)
        or plan.is_local != model_options.reads_own_part(model)
    )
