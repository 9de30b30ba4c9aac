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

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_internals
from keras_conflux._fit.callbacks import wants_every_batch
from keras_conflux._fit.execution import train_function
from keras_conflux._fit.input import epoch_iterator
from keras_conflux._fit.numerics import gradients
from keras_conflux._fit.numerics import layer_state
from keras_conflux._fit.numerics import losses
from keras_conflux._fit.numerics import random_seeds
from keras_conflux._replication import keras_distribution
from keras_conflux._replication import replicas
from keras_conflux._replication import state
from keras_conflux._replication import synchronization
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import distribution_strategy
from keras_conflux._replication.strategy import has_strategies
from keras_conflux._replication.strategy import is_replicated


def install() -> None:
    """Puts the dispatchers in place. Called once, at import."""
    keras_internals.provide_distribution(
        keras_distribution.distribute_tensor,
        keras_distribution.get_device_count,
        keras_distribution.initialize,
        keras_distribution.num_processes,
        keras_distribution.process_id,
    )
    trainer = keras_internals.TensorFlowTrainer
    for owner, name, replacement in (
        (keras_internals.BaseOptimizer, "apply", gradients.apply),
        (keras.optimizers.LossScaleOptimizer, "apply", gradients.apply),
        (keras_internals.BaseOptimizer, "scale_loss", gradients.scale_loss),
        (
            keras.optimizers.LossScaleOptimizer,
            "scale_loss",
            gradients.scale_loss,
        ),
        *(
            (optimizer, "apply", gradients.apply)
            for optimizer in keras_internals.multi_optimizers()
        ),
        (
            keras_internals.BaseOptimizer,
            "_clip_gradients",
            gradients.reduce_accumulated,
        ),
        (
            keras.optimizers.LossScaleOptimizer,
            "check_finite",
            gradients.check_finite,
        ),
        (
            keras_internals.TFOptimizer,
            "_all_reduce_sum_gradients",
            gradients.no_second_reduction,
        ),
        (
            keras_internals.loss_module,
            "scale_loss_for_distribution",
            losses.scale,
        ),
        (
            keras_internals.loss_module,
            "unscale_loss_for_distribution",
            losses.unscale,
        ),
        (keras_internals.loss_module, "reduce_values", losses.reduce_values),
        (keras_internals.loss_module, "apply_mask", losses.apply_mask),
        (keras_internals.KerasVariable, "assign", layer_state.record_assign),
        (keras_internals.KerasVariable, "assign_add", layer_state.record_add),
        (keras_internals.KerasVariable, "assign_sub", layer_state.record_add),
        (
            keras_internals.nn_module,
            "_compute_moments_sync",
            layer_state.synchronized_moments,
        ),
        (keras.metrics.Mean, "update_state", layer_state.update_mean),
        (keras.metrics.Sum, "update_state", layer_state.update_mean),
        (keras.random.SeedGenerator, "next", random_seeds.next_seed),
        (
            keras_internals.TFOptimizer,
            "add_variable_from_reference",
            _add_optimizer_variable,
        ),
        (
            keras_internals.KerasVariable,
            "__int__",
            functools.partial(_number, int),
        ),
        (
            keras_internals.KerasVariable,
            "__float__",
            functools.partial(_number, float),
        ),
        (keras_internals.Trainer, "compile", _compile),
        (trainer, "make_train_function", _make_any_function),
        (trainer, "make_test_function", _make_any_function),
        (trainer, "_make_function", _make_function),
        (trainer, "make_predict_function", _make_predict_function),
        (trainer, "_maybe_symbolic_build", _build),
        (keras_internals.TFEpochIterator, "__init__", _make_iterator),
        (
            keras_internals.TFEpochIterator,
            "_enumerate_iterator",
            epoch_iterator.enumerate_chunks,
        ),
        (trainer, "fit", _plan),
        (trainer, "evaluate", _plan),
        (trainer, "predict", _plan),
        (keras_internals.Trainer, "_resolve_auto_jit_compile", _jit_compile),
        (
            keras.distribution,
            "set_distribution",
            keras_distribution.set_distribution,
        ),
        (
            keras_internals.distribution_module,
            "set_distribution",
            keras_distribution.set_distribution,
        ),
        (
            keras.distribution.DataParallel,
            "__init__",
            keras_distribution.make_data_parallel,
        ),
        (keras_internals.TFVariable, "_initialize", _make_distributed),
        (keras_internals.TFOptimizer, "__init__", _make_distributed),
        (trainer, "__init__", _make_distributed),
    ):
        keras_internals.dispatch(owner, name, replacement)


def _strategy(model: keras.Model) -> ReplicatedStrategy | None:
    """Returns what replicates a model, after seeing to it that it does.

    Sharing a replicated layer is enough, and so is Keras' distribution.
    """
    strategy = keras_internals.strategy_of(model)
    if strategy is None:
        if has_strategies():
            strategy = state.replicated_by(state.variables_of(model))
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
    keras_internals.forget_stale_functions(model)
    return original(model, force)


def _number(kind: type, original: Callable, variable: Any) -> Any:
    # A mirrored variable has neither __int__ nor __float__; its value has.
    if is_replicated(keras_internals.backing(variable)):
        return kind(variable.numpy())
    return original(variable)


def _add_optimizer_variable(
    original: Callable, optimizer: Any, reference_variable: Any, **kwargs: Any
) -> Any:
    """Makes an optimizer's variable where the variable it is for lives."""
    value = reference_variable
    if isinstance(value, keras.Variable):
        value = keras_internals.backing(value)
    if not is_replicated(value):
        if isinstance(
            keras_internals.optimizer_strategy(optimizer), ReplicatedStrategy
        ):
            raise StrategyError(
                f"The optimizer {optimizer.name!r} was made for several "
                f"devices, and {state.name_of(reference_variable)}, which "
                "it is to update, for one. Call `keras_conflux.replicate` on "
                "the model first."
            )
        return original(optimizer, reference_variable, **kwargs)
    strategy = value.distribute_strategy
    keras_internals.set_optimizer_strategy(optimizer, strategy)
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
    return train_function.make_function(model, strategy, step_function)


def _make_predict_function(
    original: Callable, model: Any, force: bool = False
) -> Any:
    strategy = _strategy(model)
    keras_internals.forget_stale_functions(model)
    if strategy is None:
        return original(model, force)
    replicas.adopt(model, strategy)
    if model.predict_function is None or force:
        model.predict_function = train_function.make_predict_function(
            model, strategy
        )
    return model.predict_function


def _build(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Builds from the shapes of the data, without drawing a batch."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model, iterator, data_batch)
    spec = (
        data_batch if iterator is None else keras_internals.batch_spec(iterator)
    )
    with strategy.scope():
        keras_internals.symbolic_build(model, spec)
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
    original(iterator, keras_internals.default_strategy(), *args, **kwargs)
    epoch_iterator.attach(iterator, distribute_strategy)


def _plan(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets the engine run many steps a call, if no callback minds."""
    strategy = _strategy(model)
    if strategy is None:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    callbacks = given.get("callbacks") or []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    compiled = train_function.compiles(model, strategy)
    free = original.__name__ != "predict" and not any(
        wants_every_batch(each) for each in keras.tree.flatten(callbacks)
    )
    plan = epoch_iterator.Plan(
        compiled,
        compiled and free,
        is_ending=lambda: getattr(model, "stop_training", False),
    )
    with epoch_iterator.planned(plan):
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
    return strategy.communicator.on_gpu and keras_internals.supports_jit(model)
