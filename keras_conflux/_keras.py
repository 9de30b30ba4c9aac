"""The only place that touches Keras' private names. Read in 3.15.1.

Keras has no plug-in point for what replicas must do differently. `dispatch`
adds one: a method gets a second behaviour for replicated objects and stays
what it was for all others.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# The classes that hold the methods to be dispatched: Keras exports only what
# derives from them.
from keras.src.backend.common import KerasVariable
from keras.src.backend.tensorflow import nn as nn_module
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

__all__ = [
    "BaseOptimizer",
    "KerasVariable",
    "TFEpochIterator",
    "TFOptimizer",
    "TensorFlowTrainer",
    "Trainer",
    "loss_module",
    "nn_module",
]


def dispatch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Puts `replacement(original, *args, **kwargs)` in place of a method.

    Args:
        owner: The class or module that has it.
        name: The attribute's name.
        replacement: Called with the original first; decides whether it has
            something to do and calls the original if not.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, dispatcher)


def backing(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable that holds a Keras variable's value.

    `None` if it has not been made yet. `variable.value` would cast it where
    autocasting is on.
    """
    return variable._value


def set_backing(variable: keras.Variable, new: tf.Variable) -> None:
    """Puts another TensorFlow variable under a Keras variable."""
    variable._value = new


def make_backing(variable: keras.Variable, value: Any) -> tf.Variable:
    """Makes a TensorFlow variable as Keras would in the current scope."""
    # As in core.Variable._initialize.
    return tf.Variable(
        lambda: value,
        dtype=value.dtype,
        trainable=variable.trainable,
        name=variable.name,
        aggregation=variable._map_aggregation(variable.aggregation),
        synchronization=variable._map_synchronization(variable.synchronization),
    )


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy that a model was built under, if any."""
    return model._distribute_strategy


def set_strategy(model: keras.Model, strategy: Any) -> None:
    """Makes `model` train, evaluate and predict under another strategy."""
    model._distribute_strategy = strategy
    # What was traced for the former one is dropped.
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def set_optimizer_strategy(optimizer: Any, strategy: Any) -> None:
    """Makes an optimizer create and update its variables under a strategy."""
    # TFOptimizer takes the strategy at construction and never asks again.
    optimizer._distribution_strategy = strategy


def default_strategy() -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy of a single device."""
    # What `tf.distribute.get_strategy` gives where no scope is open.
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


def symbolic_build(model: keras.Model, spec: Any) -> None:
    """Builds a model, its metrics and its optimizer for batches like `spec`."""
    # Public `model.build` builds neither metrics nor the optimizer.
    model._symbolic_build(data_batch=spec)


def batch_spec(iterator: TFEpochIterator) -> Any:
    """Returns the `tf.TypeSpec`s of the batches that an iterator yields."""
    spec = iterator._distributed_dataset.element_spec
    return keras.tree.map_structure(_first_spec, spec)


def _first_spec(spec: Any) -> Any:
    # Keras' adapters put an Optional where a batch has None. A PerReplicaSpec,
    # of a DistributedDataset, holds one spec a replica.
    if isinstance(spec, tf.OptionalSpec):
        return None
    return getattr(spec, "_value_specs", (spec,))[0]
