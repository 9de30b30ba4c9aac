"""The table of what Keras does otherwise for replicated models.

Each entry replaces one method by a dispatcher that behaves as before unless a
replicated model, or a replica, is concerned.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux import _keras
from keras_conflux import replicas
from keras_conflux.engine import gradients
from keras_conflux.engine import losses
from keras_conflux.engine import randomness
from keras_conflux.engine import statistics
from keras_conflux.engine import step
from keras_conflux.strategy import ReplicatedStrategy


def install() -> None:
    """Puts the dispatchers in place. Called once, at import."""
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
        (
            _keras.nn_module,
            "_compute_moments_sync",
            statistics.synchronized_moments,
        ),
        (keras.random.SeedGenerator, "next", randomness.next_seed),
        (_keras.KerasVariable, "__int__", _int),
        (_keras.Trainer, "compile", _compile),
        (trainer, "_make_function", _make_function),
        (trainer, "make_predict_function", _make_predict_function),
        (trainer, "_maybe_symbolic_build", _build),
        (_keras.TFEpochIterator, "__init__", _make_iterator),
    ):
        _keras.dispatch(owner, name, replacement)


def _strategy(model: keras.Model) -> ReplicatedStrategy | None:
    strategy = _keras.strategy_of(model)
    return strategy if isinstance(strategy, ReplicatedStrategy) else None


def _int(original: Callable, variable: Any) -> int:
    # A mirrored variable has no __int__; its value has.
    value = _keras.backing(variable)
    if isinstance(value, tf.distribute.DistributedValues):
        return int(variable.numpy())
    return original(variable)


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
    replicas.adopt(model, strategy)
    spec = data_batch if iterator is None else _keras.batch_spec(iterator)
    with strategy.scope(), contextlib.suppress(RuntimeError):
        # RuntimeError: a model without `call`, whose step knows what to do.
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
    if isinstance(distribute_strategy, ReplicatedStrategy):
        distribute_strategy = _keras.default_strategy()
    original(iterator, distribute_strategy, *args, **kwargs)
