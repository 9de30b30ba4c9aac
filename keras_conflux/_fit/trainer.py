"""What `compile`, `fit`, `evaluate` and `predict` do for replicated models.

Each function stands in front of the trainer's method of its name, or of nearly
its name, and calls it as `original`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_conflux._cluster.agreement import agree
from keras_conflux._cluster.failures import told_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_iterators
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._fit import log_sources
from keras_conflux._fit import side_effects
from keras_conflux._fit import slow_input
from keras_conflux._fit.execution import train_function
from keras_conflux._fit.first_process import led
from keras_conflux._fit.input import epoch_iterator
from keras_conflux._fit.input.epoch_observer import current_observer
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.execution_plan import current_plan
from keras_conflux._fit.input.execution_plan import following
from keras_conflux._fit.input.reshuffled_arrays import reshuffling
from keras_conflux._replication import common_seed
from keras_conflux._replication import data_contract
from keras_conflux._replication import promotion
from keras_conflux._replication import state
from keras_conflux._replication import synchronization
from keras_conflux._replication import traced_functions
from keras_conflux._replication.running import running
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import default_strategy
from keras_conflux._replication.strategy import distribution_strategy
from keras_conflux._replication.strategy import has_strategies
from keras_conflux._replication.strategy import is_replicated


def compile(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replicates the optimizer and the metrics that it makes."""
    strategy = _strategy(model)
    result = original(model, *args, **kwargs)
    if strategy is not None:
        promotion.promote_new_state(model, strategy)
        common_seed.give_back()
    return result


def resolve_auto_jit_compile(original: Callable, model: Any) -> bool:
    """Decides for `jit_compile="auto"`, which Keras refuses to strategies."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model)
    return strategy.communicator.on_gpu and keras_models.supports_jit(model)


def fit(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs many steps per execution, if no callback minds."""
    strategy = _strategy(model)
    args, kwargs = _log_sources_first(original, model, args, kwargs)
    if strategy is None:
        with running(model, "fit"):
            return original(model, *args, **kwargs)
    callbacks = _callbacks(original, model, args, kwargs)
    with together(model, f"fit{log_sources.described(callbacks)}"):
        plan = ExecutionPlan.of_fit(model, strategy, callbacks)
        if strategy.communicator.spans_processes:
            synchronization.synchronize(model)
        with following(plan):
            history = _call_once_shown(
                *(original, model, args, kwargs),
                completed=functools.partial(led, model),
            )
    slow_input.tell(model.name, plan.measurements)
    if plan.compiled and strategy.communicator.size > 1:
        # XLA sums in other orders on each GPU. Where an optimizer sums, as
        # for `global_clipnorm`, copies come apart by roundings.
        synchronization.synchronize(model)
    elif plan.eager and strategy.communicator.spans_processes:
        # Each has run the steps, and Python may have drawn other numbers.
        synchronization.synchronize(model)
    return history


def evaluate(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs many steps per execution, if no callback minds."""
    strategy = _strategy(model)
    if strategy is None:
        with running(model, "evaluate"):
            return original(model, *args, **kwargs)
    callbacks = _callbacks(original, model, args, kwargs)
    with together(model, "evaluate"):
        plan = ExecutionPlan.of_fit(model, strategy, callbacks)
        with following(plan):
            return _call_once_shown(original, model, args, kwargs)


def predict(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs as many steps per execution as the user has asked for."""
    strategy = _strategy(model)
    if strategy is None:
        with running(model, "predict"):
            return original(model, *args, **kwargs)
    plan = ExecutionPlan.of(model, strategy)
    with together(model, "predict"), following(plan):
        return _call_once_shown(original, model, args, kwargs)


@contextlib.contextmanager
def together(model: keras.Model, call: str) -> Iterator[None]:
    """Sees to it that all processes begin and end a call with each other."""
    what = f"{call} of {model.name}"
    with told_to_all(what), running(model, call.split()[0]):
        agree(f"the begin of {what}")
        yield
        agree(f"the end of {what}")


def _call_once_shown(
    original: Callable,
    model: Any,
    args: tuple,
    kwargs: dict,
    completed: Callable[[list[Any]], list[Any]] = list,
) -> Any:
    """Shows and writes in the first of several processes only.

    Args:
        original: Keras' method.
        model: Whose it is.
        args: What it is given.
        kwargs: What it is given by name.
        completed: Adds to the callbacks that this process calls.
    """
    if process_count() == 1:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    if process_index() > 0:
        given.arguments["verbose"] = 0
    listed = given.arguments.get("callbacks") or []
    callbacks = completed(side_effects.of_this_process(_listed(listed)))
    if isinstance(listed, keras.callbacks.CallbackList):
        listed.callbacks = callbacks
    else:
        given.arguments["callbacks"] = callbacks
    return original(*given.args, **given.kwargs)


def build(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Builds from the shapes of the data, without drawing a batch.

    On one device, the first step makes metrics after the reset with which an
    epoch begins. So that reset leaves them with what they begin with.
    """
    strategy = _strategy(model)
    if strategy is None:
        return original(model, iterator, data_batch)
    spec = (
        data_batch if iterator is None else keras_iterators.batch_spec(iterator)
    )
    if keras_models.runs_eagerly(model):  # its first step builds what it needs
        promotion.promote_new_state(model, strategy)
    else:
        known = {id(variable) for variable in model.metrics_variables}
        promotion.build(model, spec, strategy)
        _keep_at_next_reset(
            model, [v for v in model.metrics_variables if id(v) not in known]
        )


def _keep_at_next_reset(model: Any, variables: list[keras.Variable]) -> None:
    values = [(v, np.array(keras_variables.as_tensor(v))) for v in variables]
    if not any(value.any() for _, value in values):
        return

    def reset_once() -> None:
        del vars(model)["reset_metrics"]
        model.reset_metrics()
        for variable, value in values:
            state.set_sum(keras_variables.backing(variable), value)

    vars(model)["reset_metrics"] = reset_once


def make_train_function(
    original: Callable, model: Any, force: bool = False
) -> Any:
    """Makes a new function where the former one has become stale."""
    return original(model, force or _is_outdated(model.train_function, model))


def make_test_function(
    original: Callable, model: Any, force: bool = False
) -> Any:
    """Makes a new function where the former one has become stale."""
    return original(model, force or _is_outdated(model.test_function, model))


def make_function(original: Callable, model: Any, step_function: Any) -> Any:
    """Makes a train or test function that runs on all replicas."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model, step_function)
    return train_function.make_function(model, strategy, step_function)


def make_predict_function(
    original: Callable, model: Any, force: bool = False
) -> Any:
    """Makes a predict function that runs on all replicas."""
    strategy = _strategy(model)
    if strategy is None:
        stale = traced_functions.is_stale(model.predict_function)
        return original(model, force or stale)
    promotion.promote_new_state(model, strategy)
    function = model.predict_function
    if function is None or force or _is_outdated(function, model):
        model.predict_function = train_function.make_predict_function(
            model, strategy
        )
    return model.predict_function


def metrics_or_logs(original: Callable, model: Any, logs: Any) -> Any:
    """Reads what is a variable: the `result` of some metrics is one."""
    return keras.tree.map_structure(
        lambda value: value.numpy() if is_replicated(value) else value,
        original(model, logs),
    )


def make_iterator(
    original: Callable,
    iterator: Any,
    distribute_strategy: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Makes an epoch iterator over global batches, which is drawn from here.

    One that is made outside of `fit`, `evaluate` and `predict` is TensorFlow's.
    """
    plan = current_plan()
    if plan is None or plan.strategy is not distribute_strategy:
        original(iterator, distribute_strategy, *args, **kwargs)
    else:
        with reshuffling(plan.reshuffles):
            original(iterator, default_strategy(), *args, **kwargs)
        epoch_iterator.attach(iterator, plan)
    current_observer().made(iterator)


def _is_outdated(function: Any, model: keras.Model) -> bool:
    """Whether a function of a model has to be made anew."""
    return traced_functions.is_stale(
        function
    ) or train_function.is_of_other_mode(function, model)


def _strategy(model: keras.Model) -> ReplicatedStrategy | None:
    """Returns what replicates a model, after seeing to it that it does.

    Sharing a replicated layer is enough, and so is Keras' distribution.
    """
    strategy = keras_models.strategy_of(model)
    if strategy is None:
        if has_strategies():
            strategy = state.replicated_by(state.variables_of(model))
        strategy = strategy or distribution_strategy()
        if strategy is not None:
            promotion.promote(model, strategy)
    data_contract.follow(model)
    if not isinstance(strategy, ReplicatedStrategy):
        return None
    if strategy.communicator.size > 1:
        _refuse_stateful(model)
    return strategy


def _refuse_stateful(model: keras.Model) -> None:
    """Raises for layers that go on, in each batch, where the last one ended."""
    names = [
        layer.name
        for layer in keras_models.all_layers(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
    ]
    if names:
        raise StrategyError(
            f"{model.name}: the layer {names[0]!r} has `stateful=True` and "
            "keeps a state for each row of a batch, of which each replica has "
            "other rows. Received: a model on several devices. A "
            "`batch_shape` of one replica's rows would not help, as all copies "
            "of a weight are equal. Give the layer its `initial_state` as an "
            "input of the model, and take the next one from "
            "`return_state=True`, or train on one device, with "
            "`keras_conflux.replicate(model, devices=1)` or "
            "`keras_conflux.unreplicate(model)`."
        )


def _log_sources_first(
    original: Callable, model: Any, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Returns the arguments of `fit`, with callbacks in the right order."""
    try:
        given = inspect.signature(original).bind(model, *args, **kwargs)
    except TypeError:  # which Keras raises in its own words
        return args, kwargs
    callbacks = given.arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks = log_sources.first(callbacks.callbacks)
    elif callbacks:
        given.arguments["callbacks"] = log_sources.first(
            keras.tree.flatten(callbacks)
        )
    else:
        return args, kwargs
    return given.args[1:], given.kwargs


def _callbacks(
    original: Callable, model: Any, args: tuple, kwargs: dict
) -> list[Any]:
    try:
        given = inspect.signature(original).bind(model, *args, **kwargs)
    except TypeError:  # which Keras raises in its own words
        return []
    return _listed(given.arguments.get("callbacks") or [])


def _listed(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return keras.tree.flatten(callbacks)
