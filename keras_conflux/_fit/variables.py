"""Where variables of replicated models and optimizers are made, and read."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import whole_batch_strategy
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import distribution_strategy
from keras_conflux._replication.strategy import is_replicated


def initialize(original: Callable, variable: Any, value: Any) -> None:
    """Gives a variable its copies, under a strategy or Keras' distribution."""
    strategy = _strategy_of_variables()
    if strategy is None:
        # An initial value has nothing to do with the samples of a step.
        with steps.entered(None):
            original(variable, value)
        return
    # XLA cannot make mirrored variables in a `tf.function`, which may be
    # compiled. So they are made outside of it, where their value allows that.
    known = value
    if not tf.executing_eagerly() and not callable(value):
        known = tf.get_static_value(value)
    with strategy.scope():
        if known is None:
            original(variable, value)
            return
        with tf.init_scope(), strategy.scope():
            original(variable, known)


def _strategy_of_variables() -> ReplicatedStrategy | None:
    if not tf.distribute.has_strategy():
        return whole_batch_strategy() or distribution_strategy()
    current = tf.distribute.get_strategy()
    in_its_scope = tf.distribute.in_cross_replica_context()
    is_ours = isinstance(current, ReplicatedStrategy)
    return current if is_ours and in_its_scope else None


def build_loss_scale_optimizer(
    original: Callable, optimizer: Any, var_list: list[Any]
) -> None:
    """Makes its variables, named as by a first step, where others are."""
    # Keras builds optimizers in `apply`, under their name. On replicated
    # models they are built before the first step.
    here = tf.distribute.get_strategy()
    of_variables = state.strategy_of(var_list)
    with contextlib.ExitStack() as contexts:
        if isinstance(here, ReplicatedStrategy):
            named = keras.name_scope(optimizer.name, caller=optimizer)
            contexts.enter_context(named)
        elif of_variables is not None:  # the user builds it
            contexts.enter_context(of_variables.scope())
        original(optimizer, var_list)


def handle(original: Callable, variable: Any) -> Any:
    """Returns the handle, also in a scope, by which a tape knows a variable."""
    value = keras_variables.backing(variable)
    in_scope = is_replicated(value) and tf.distribute.in_cross_replica_context()
    if in_scope or state.is_in_parts(value):  # of which a step reads the part
        return tensorflow_internals.copy_that_is_read(value).handle
    return original(variable)


def add_optimizer_variable(
    original: Callable,
    optimizer: Any,
    reference_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes an optimizer's variable where the variable it is for lives."""
    value = state.backing(reference_variable)
    if not is_replicated(value):
        made_for = keras_models.optimizer_strategy(optimizer)
        if isinstance(made_for, ReplicatedStrategy):
            raise StrategyError(
                f"The optimizer {optimizer.name!r} was made for several "
                f"devices, and {state.name_of(reference_variable)}, which "
                "it is to update, for one. Call `keras_conflux.replicate` on "
                "the model first."
            )
        return original(optimizer, reference_variable, *args, **kwargs)
    strategy = value.distribute_strategy
    keras_models.set_optimizer_strategy(optimizer, strategy)
    if tf.distribute.get_strategy() is strategy:
        return original(optimizer, reference_variable, *args, **kwargs)
    with strategy.scope():
        return original(optimizer, reference_variable, *args, **kwargs)
