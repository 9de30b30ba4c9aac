"""The table of what Keras does otherwise for replicated models.

Each entry replaces one method by a dispatcher that behaves as before unless a
replicated model, or a replica, is concerned.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux import _keras
from keras_conflux import distribution
from keras_conflux import replicas
from keras_conflux import synchronization
from keras_conflux import variables
from keras_conflux.engine import epoch
from keras_conflux.engine import gradients
from keras_conflux.engine import losses
from keras_conflux.engine import randomness
from keras_conflux.engine import statistics
from keras_conflux.engine import step
from keras_conflux.engine.callbacks import wants_every_batch
from keras_conflux.errors import StrategyError
from keras_conflux.strategy import ReplicatedStrategy
from keras_conflux.strategy import distribution_strategy
from keras_conflux.strategy import has_strategies
from keras_conflux.strategy import is_replicated


def install() -> None:
    """Puts the dispatchers in place. Called once, at import."""
    _keras.provide_distribution(
        distribution.distribute_tensor,
        distribution.get_device_count,
        distribution.initialize,
        distribution.num_processes,
        distribution.process_id,
    )
    trainer = _keras.TensorFlowTrainer
    for owner, name, replacement in (
        (_keras.BaseOptimizer, "apply", gradients.apply),
        (keras.optimizers.LossScaleOptimizer, "apply", gradients.apply),
        (_keras.BaseOptimizer, "scale_loss", gradients.scale_loss),
        (
            keras.optimizers.LossScaleOptimizer,
            "scale_loss",
            gradients.scale_loss,
        ),
        *(
            (optimizer, "apply", gradients.apply)
            for optimizer in _keras.multi_optimizers()
        ),
        (_keras.BaseOptimizer, "_clip_gradients", gradients.reduce_accumulated),
        (
            keras.optimizers.LossScaleOptimizer,
            "check_finite",
            gradients.check_finite,
        ),
        (
            _keras.TFOptimizer,
            "_all_reduce_sum_gradients",
            gradients.no_second_reduction,
        ),
        (_keras.loss_module, "scale_loss_for_distribution", losses.scale),
        (_keras.loss_module, "unscale_loss_for_distribution", losses.unscale),
        (_keras.loss_module, "reduce_values", losses.reduce_values),
        (_keras.loss_module, "apply_mask", losses.apply_mask),
        (_keras.KerasVariable, "assign", statistics.record_assign),
        (_keras.KerasVariable, "assign_add", statistics.record_add),
        (_keras.KerasVariable, "assign_sub", statistics.record_add),
        (
            _keras.nn_module,
            "_compute_moments_sync",
            statistics.synchronized_moments,
        ),
        (keras.metrics.Mean, "update_state", statistics.update_mean),
        (keras.metrics.Sum, "update_state", statistics.update_mean),
        (keras.random.SeedGenerator, "next", randomness.next_seed),
        (
            _keras.TFOptimizer,
            "add_variable_from_reference",
            _add_optimizer_variable,
        ),
        (_keras.KerasVariable, "__int__", functools.partial(_number, int)),
        (_keras.KerasVariable, "__float__", functools.partial(_number, float)),
        (_keras.Trainer, "compile", _compile),
        (trainer, "make_train_function", _make_any_function),
        (trainer, "make_test_function", _make_any_function),
        (trainer, "_make_function", _make_function),
        (trainer, "make_predict_function", _make_predict_function),
        (trainer, "_maybe_symbolic_build", _build),
        (_keras.TFEpochIterator, "__init__", _make_iterator),
        (
            _keras.TFEpochIterator,
            "_enumerate_iterator",
            epoch.enumerate_chunks,
        ),
        (trainer, "fit", _plan),
        (trainer, "evaluate", _plan),
        (trainer, "predict", _plan),
        (_keras.Trainer, "_resolve_auto_jit_compile", _jit_compile),
        (keras.distribution, "set_distribution", distribution.set_distribution),
        (
            _keras.distribution_module,
            "set_distribution",
            distribution.set_distribution,
        ),
        (
            keras.distribution.DataParallel,
            "__init__",
            distribution.make_data_parallel,
        ),
        (_keras.TFVariable, "_initialize", _make_distributed),
        (_keras.TFOptimizer, "__init__", _make_distributed),
        (trainer, "__init__", _make_distributed),
    ):
        _keras.dispatch(owner, name, replacement)


def _strategy(model: keras.Model) -> ReplicatedStrategy | None:
    """Returns what replicates a model, after seeing to it that it does.

    Sharing a replicated layer is enough, and so is Keras' distribution.
    """
    strategy = _keras.strategy_of(model)
    if strategy is None:
        if has_strategies():
            strategy = variables.replicated_by(variables.variables_of(model))
        strategy = strategy or distribution_strategy()
        if strategy is not None:
            replicas.replicate_in_place(model, strategy)
    return strategy if isinstance(strategy, ReplicatedStrategy) else None


def _make_distributed(original: Callable, *args: Any, **kwargs: Any) -> None:
    """Makes a variable, an optimizer or a model under Keras' distribution."""
    strategy = distribution_strategy()
    if strategy is None or tf.distribute.has_strategy():
        original(*args, **kwargs)
        return
    with strategy.scope():
        original(*args, **kwargs)


def _make_any_function(
    original: Callable, model: Any, force: bool = False
) -> Any:
    _keras.forget_stale_functions(model)
    return original(model, force)


def _number(kind: type, original: Callable, variable: Any) -> Any:
    # A mirrored variable has neither __int__ nor __float__; its value has.
    if is_replicated(_keras.backing(variable)):
        return kind(variable.numpy())
    return original(variable)


def _add_optimizer_variable(
    original: Callable, optimizer: Any, reference_variable: Any, **kwargs: Any
) -> Any:
    """Makes an optimizer's variable where the variable it is for lives."""
    value = reference_variable
    if isinstance(value, keras.Variable):
        value = _keras.backing(value)
    if not is_replicated(value):
        if isinstance(_keras.optimizer_strategy(optimizer), ReplicatedStrategy):
            raise StrategyError(
                f"The optimizer {optimizer.name!r} was made for several "
                f"devices, and {variables.name_of(reference_variable)}, which "
                "it is to update, for one. Call `keras_conflux.replicate` on "
                "the model first."
            )
        return original(optimizer, reference_variable, **kwargs)
    strategy = value.distribute_strategy
    _keras.set_optimizer_strategy(optimizer, strategy)
    if tf.distribute.get_strategy() is strategy:
        return original(optimizer, reference_variable, **kwargs)
    with strategy.scope():
        return original(optimizer, reference_variable, **kwargs)


def _compile(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = _strategy(model)
    if strategy is None:
        return original(model, *args, **kwargs)
    result = original(model, *args, **kwargs)
    replicas.adopt(model, strategy)
    return result


def _make_function(original: Callable, model: Any, step_function: Any) -> Any:
    strategy = _strategy(model)
    if strategy is None:
        return original(model, step_function)
    return step.make_function(model, strategy, step_function)


def _make_predict_function(
    original: Callable, model: Any, force: bool = False
) -> Any:
    strategy = _strategy(model)
    _keras.forget_stale_functions(model)
    if strategy is None:
        return original(model, force)
    replicas.adopt(model, strategy)
    if model.predict_function is None or force:
        model.predict_function = step.make_predict_function(model, strategy)
    return model.predict_function


def _build(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Builds from the shapes of the data, without drawing a batch."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model, iterator, data_batch)
    spec = data_batch if iterator is None else _keras.batch_spec(iterator)
    with strategy.scope():
        _keras.symbolic_build(model, spec)
    replicas.adopt(model, strategy)


def _make_iterator(
    original: Callable,
    iterator: Any,
    distribute_strategy: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Lets the engine split batches: the iterator yields global ones."""
    if not isinstance(distribute_strategy, ReplicatedStrategy):
        original(iterator, distribute_strategy, *args, **kwargs)
        return
    original(iterator, _keras.default_strategy(), *args, **kwargs)
    epoch.attach(iterator, distribute_strategy)


def _plan(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets the engine run many steps a call, if no callback minds."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    callbacks = given.get("callbacks") or []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    compiled = step.compiles(model, strategy)
    free = original.__name__ != "predict" and not any(
        wants_every_batch(each) for each in keras.tree.flatten(callbacks)
    )
    plan = epoch.Plan(
        compiled,
        compiled and free,
        is_ending=lambda: getattr(model, "stop_training", False),
    )
    with epoch.planned(plan):
        result = original(model, *args, **kwargs)
    several = strategy.communicator.size > 1
    if compiled and several and original.__name__ == "fit":
        # XLA sums in other orders on each GPU. Where an optimizer sums, as
        # for `global_clipnorm`, copies come apart by roundings.
        synchronization.synchronize(model)
    return result


def _jit_compile(original: Callable, model: Any) -> bool:
    """Decides for `jit_compile="auto"`, which Keras refuses to strategies."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model)
    return strategy.communicator.on_gpu and _keras.supports_jit(model)
