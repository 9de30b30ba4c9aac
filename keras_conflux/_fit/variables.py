"""Where variables of replicated models and optimizers are made, and read."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_internals
from keras_conflux._replication import state
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import distribution_strategy
from keras_conflux._replication.strategy import is_replicated


def make_distributed(original: Callable, *args: Any, **kwargs: Any) -> None:
    """Makes a variable, an optimizer or a model under Keras' distribution."""
    strategy = distribution_strategy()
    if strategy is None or tf.distribute.has_strategy():
        original(*args, **kwargs)
        return
    with strategy.scope():
        original(*args, **kwargs)


def to_number(kind: type, original: Callable, variable: Any) -> Any:
    """Converts a variable to a Python number."""
    # A mirrored variable has neither __int__ nor __float__; its value has.
    if is_replicated(keras_internals.backing(variable)):
        return kind(variable.numpy())
    return original(variable)


def add_optimizer_variable(
    original: Callable, optimizer: Any, reference_variable: Any, **kwargs: Any
) -> Any:
    """Makes an optimizer's variable where the variable it is for lives."""
    value = reference_variable
    if isinstance(value, keras.Variable):
        value = keras_internals.backing(value)
    if not is_replicated(value):
        made_for = keras_internals.optimizer_strategy(optimizer)
        if isinstance(made_for, ReplicatedStrategy):
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
