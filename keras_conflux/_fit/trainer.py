"""The methods `compile`, `fit`, `evaluate` and `predict` of replicated models.

Each function stands in front of the trainer's method of its name, or of nearly
its name, and calls it as `original`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._common import errors
from keras_conflux._common import trees
from keras_conflux._compat import keras_iterators
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._compat import replicated_extended
from keras_conflux._fit import first_process
from keras_conflux._fit.execution import train_function
from keras_conflux._fit.input import calls
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.execution_plan import use_plan
from keras_conflux._fit.input.measurements import Measurements
from keras_conflux._replication import combinations
from keras_conflux._replication import common_state
from keras_conflux._replication import model_options
from keras_conflux._replication import promotion
from keras_conflux._replication import state
from keras_conflux._replication import synchronization
from keras_conflux._replication import traced_functions
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.running import running
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import distribution_strategy
from keras_conflux._replication.strategy import has_strategies
from keras_conflux._replication.strategy import is_replicated

_told_at_the_end: list[Callable[[str, Measurements], None]] = []
after_fit = _told_at_the_end.append
"""Has a function called with each `fit`'s model and measurements."""


def compile(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replicates the optimizer and the metrics that it makes."""
    strategy = _strategy(model)
    result = original(model, *args, **kwargs)
    if strategy is not None:
        promotion.promote_new_state(model, strategy)
        promotion.give_back_seed()
    return result


def resolve_auto_jit_compile(original: Callable, model: Any) -> bool:
    """Decides for `jit_compile="auto"`, which Keras refuses to strategies."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model)
    return strategy.communicator.on_gpu and keras_models.supports_jit(model)


def fit(*args: Any, **kwargs: Any) -> Any:
    """Runs many steps per execution, if no callback minds."""
    call = calls.KerasCall("fit", *args, **kwargs)
    return calls.observers[-1].fit(call, lambda: _fit(call))


def _fit(call: calls.KerasCall) -> Any:
    call.callbacks = sorted(
        call.callbacks, key=lambda each: not isinstance(each, calls.LogSource)
    )
    plan, history = _run(call)
    if plan is None:
        return history
    for tell in _told_at_the_end:
        tell(call.model.name, plan.measurements)
    # XLA sums in other orders on each GPU. Where an optimizer sums, as for
    # `global_clipnorm`, copies come apart by roundings.
    others = plan.compiled and plan.strategy.communicator.size > 1
    # Processes run eager steps apart, and Python may draw other numbers.
    if others or (plan.eager and plan.strategy.communicator.spans_processes):
        synchronization.synchronize(call.model)
    return history


def run(*call: Any, **kwargs: Any) -> Any:
    """Runs `evaluate` or `predict`, in its executions. See `KerasCall`."""
    return _run(calls.KerasCall(*call, **kwargs))[1]


def _run(call: calls.KerasCall) -> tuple[ExecutionPlan | None, Any]:
    """Runs a call, which all processes begin and end with each other.

    There is no plan for a model without replicas.
    """
    model, callbacks, fits = call.model, call.callbacks, call.name == "fit"
    strategy = _strategy(model)
    if strategy is None:
        with running(model, call.name):
            return None, call.run()
    added = calls.log_sources_in_words(callbacks) if fits else ""
    what = f"{call.name}{added} of {model.name}"
    with errors_reported_to_all(what), running(model, call.name):
        begin = f"the begin of {what}"
        spans_processes = strategy.communicator.spans_processes
        fits_with_others = fits and spans_processes
        if fits_with_others:
            common_state.agree_on_state(model, begin, has_variables=False)
        elif spans_processes:
            common_state.agree_on_assigned(begin, lambda: model.weights)
        if call.name == "predict":
            plan = ExecutionPlan.of(model, strategy)
        else:
            plan = ExecutionPlan.of_fit(model, strategy, callbacks)
        agree = functools.partial(
            common_state.agree_on_state, model, has_variables=not plan.eager
        )
        if fits_with_others:
            synchronization.synchronize(model)
            replicated_extended.note_compared()
            at_end = functools.partial(agree, f"the end of an epoch, {what}")
            plan = dataclasses.replace(plan, at_epoch_end=at_end)
        if spans_processes:
            first_process.show_and_write_there(call, leads=fits)
        with use_plan(plan):
            result = call.run()
        if fits_with_others:
            agree(f"the end of {what}")
        else:
            assert_same_place(f"the end of {what}")
    return plan, result


def build(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Builds from the shapes of the data, without drawing a batch.

    On one device, the first step makes metrics after the reset with which an
    epoch begins. So that reset leaves them with their initial values.
    """
    strategy = _strategy(model)
    if strategy is None:
        return original(model, iterator, data_batch)
    spec = (
        data_batch if iterator is None else keras_iterators.batch_spec(iterator)
    )
    if keras_models.runs_eagerly(model):  # its first step builds the rest
        promotion.promote_new_state(model, strategy)
    else:
        known = {id(variable) for variable in model.metrics_variables}
        try:
            with errors.with_notes(model):
                promotion.build(model, spec, strategy)
        except ValueError as error:
            leaves = trees.flatten(spec)
            if all(len(leaf.shape) == 0 or leaf.shape[0] for leaf in leaves):
                error.add_note(
                    f"The data yield {', '.join(map(trees.describe, leaves))}. "
                    "If that is one sample, give `fit` `dataset.batch(32)`."
                )
            raise
        _keep_at_next_reset(
            model, [v for v in model.metrics_variables if id(v) not in known]
        )


def _keep_at_next_reset(model: Any, variables: list[keras.Variable]) -> None:
    """Has the next reset change nothing in new variables of metrics.

    One that is no sum, such as a weight, keeps its value of then.
    """
    if not variables:
        return

    def now(variable: keras.Variable) -> Any:
        return np.array(keras_variables.as_tensor(variable))

    sums = [v for v in variables if state.is_sum(state.backing(v))]
    begun = {id(v): now(v) for v in sums}

    def reset_once() -> None:
        del vars(model)["reset_metrics"]
        kept = [(v, begun.get(id(v), now(v))) for v in variables]
        model.reset_metrics()
        for variable, value in kept:
            keras_variables.backing(variable).assign(value)

    vars(model)["reset_metrics"] = reset_once


def make_anew(original: Callable, model: Any, force: bool = False) -> Any:
    """Makes a new function where the former one has become stale."""
    former = getattr(model, original.__name__.removeprefix("make_"))
    return original(model, force or _is_outdated(former, model))


def make_function(original: Callable, model: Any, step_function: Any) -> Any:
    """Makes a train or test function that runs on all replicas."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model, step_function)
    turns = model_options.microbatches_of(model)
    if turns != 1 and not keras_models.runs_eagerly(model):
        _refuse_stateful(model, f"microbatches={turns!r}")
    return train_function.make_function(model, strategy, step_function)


def make_predict_function(
    original: Callable, model: Any, force: bool = False
) -> Any:
    """Makes a predict function that runs on all replicas."""
    strategy = _strategy(model)
    if strategy is None:
        return make_anew(original, model, force)
    promotion.promote_new_state(model, strategy)
    function = model.predict_function
    if function is None or force or _is_outdated(function, model):
        function = train_function.make_predict_function(model, strategy)
        model.predict_function = function
    return function


def metrics_or_logs(original: Callable, model: Any, logs: Any) -> Any:
    """Reads variables: the `result` of some metrics is one."""
    return keras.tree.map_structure(
        lambda value: value.numpy() if is_replicated(value) else value,
        original(model, logs),
    )


def _is_outdated(function: Any, model: keras.Model) -> bool:
    """Whether a function of a model has to be made anew."""
    is_stale = traced_functions.is_stale(function)
    return is_stale or train_function.is_of_other_mode(function, model)


def _strategy(model: keras.Model) -> ReplicatedStrategy | None:
    """Returns a model's strategy, after replicating its new parts."""
    if in_replica():
        raise errors.StrategyError(
            f"{model.name}: `fit`, `evaluate` and `predict` run a step on each "
            "device themselves. Call them outside of a `withdevices` step."
        )
    strategy = keras_models.strategy_of(model)
    if strategy is None:
        if has_strategies():
            strategy = state.replicated_by(state.variables_of(model))
        strategy = strategy or distribution_strategy()
        if strategy is not None:
            promotion.promote(model, strategy)
    if not isinstance(strategy, ReplicatedStrategy):
        return None
    if strategy.communicator.size > 1:
        _refuse_stateful(model, "a model on several devices")
    return strategy


def _refuse_stateful(model: keras.Model, received: str) -> None:
    """Raises for layers that go on, in each batch, where the last one ended."""
    layers = keras_models.all_layers(model)
    refused = combinations.refusal_of_states(layers, received)
    if refused:
        raise errors.StrategyError(f"{model.name}: {refused}")
