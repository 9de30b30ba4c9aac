"""The only place that touches Keras' private names. Read in 3.15.1.

Keras has no plug-in point for what replicas must do differently. `dispatch`
adds one: a method gets a second behaviour for replicated objects and stays
what it was for all others.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# The classes that hold the methods to be dispatched: Keras exports only what
# derives from them.
from keras.src.backend.common import KerasVariable
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import (
    distribution_lib as backend_distribution,
)
from keras.src.backend.tensorflow import nn as nn_module
from keras.src.backend.tensorflow.core import Variable as TFVariable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.distribution import distribution_lib as distribution_module
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator
from keras.src.trainers import trainer as trainer_module
from keras.src.trainers.trainer import Trainer

__all__ = [
    "BaseOptimizer",
    "KerasVariable",
    "TFEpochIterator",
    "TFOptimizer",
    "TFVariable",
    "TensorFlowTrainer",
    "Trainer",
    "distribution_module",
    "loss_module",
    "nn_module",
]


_exchanges = [0]


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


def provide_distribution(*functions: Callable[..., Any]) -> None:
    """Gives Keras what its TensorFlow backend lacks for `keras.distribution`.

    Args:
        *functions: Found by their names, which are those that other backends
            have.
    """
    # keras.src.distribution calls them on this module. In 3.14.0 and 3.15.1
    # it has `list_devices`, which works, and attempts at DTensor.
    for function in functions:
        setattr(backend_distribution, function.__name__, function)


def backing(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable that holds a Keras variable's value.

    `None` if it has not been made yet. `variable.value` would cast it where
    autocasting is on.
    """
    return variable._value


def set_backing(variable: keras.Variable, new: tf.Variable) -> None:
    """Puts another TensorFlow variable under a Keras variable."""
    variable._value = new
    _exchanges[0] += 1


def forget_stale_functions(model: keras.Model) -> None:
    """Drops what was traced over variables that have been exchanged since.

    A model that shares layers with a replicated one is concerned, too.
    """
    if getattr(model, "_conflux_exchanges", 0) != _exchanges[0]:
        model._conflux_exchanges = _exchanges[0]
        model.train_function = None
        model.test_function = None
        model.predict_function = None


def make_backing(
    variable: keras.Variable, value: Any, summed: bool = False
) -> tf.Variable:
    """Makes a TensorFlow variable as Keras would in the current scope.

    Args:
        variable: The Keras variable that it is for.
        value: Its initial value.
        summed: Whether its value is the sum of what replicas hold, whatever
            Keras says.
    """
    # As in core.Variable._initialize, except that a copy that a replica writes
    # is never reduced on the way: it would be reduced at each writing, and
    # Keras writes a sum by writing the old sum and what is added.
    synchronization = "on_read" if summed else variable.synchronization
    aggregation = "sum" if summed else variable.aggregation
    if synchronization != "on_read":
        aggregation = "none"
    # Freezing a Keras variable leaves TensorFlow's watched by gradient tapes;
    # what is made while it is frozen must be as well.
    old = backing(variable)
    return tf.Variable(
        lambda: value,
        dtype=value.dtype,
        trainable=variable.trainable if old is None else old.trainable,
        name=variable.name,
        aggregation=variable._map_aggregation(aggregation),
        synchronization=variable._map_synchronization(synchronization),
    )


def multi_optimizers() -> list[type]:
    """Returns `MultiOptimizer`, if Keras has it: from 3.15 on."""
    found = getattr(keras.optimizers, "MultiOptimizer", None)
    return [found] if found is not None else []


def accumulators(optimizer: Any) -> list[keras.Variable]:
    """Returns the variables that add up gradients between updates."""
    # Keras has no public name for them (base_optimizer.py, `build`).
    found = getattr(optimizer, "_accumulated_gradients", None) or []
    return [variable for variable in found if variable is not None]


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


def optimizer_strategy(optimizer: Any) -> tf.distribute.Strategy:
    """Returns the strategy that an optimizer makes its variables under."""
    return optimizer._distribution_strategy


def set_optimizer_strategy(optimizer: Any, strategy: Any) -> None:
    """Makes an optimizer create and update its variables under a strategy."""
    # TFOptimizer takes the strategy at construction and never asks again.
    optimizer._distribution_strategy = strategy


def default_strategy() -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy of a single device."""
    # What `tf.distribute.get_strategy` gives where no scope is open.
    with tf.Graph().as_default():
        return tf.distribute.get_strategy()


def global_seed_generator() -> keras.random.SeedGenerator:
    """Returns the generator behind `keras.random` without a seed."""
    # Made here, outside of any function, for a function makes no variables.
    # Its seed comes from Python's `random`. A model that never asks for it
    # would not have drawn: what a PyDataset shuffles by stays the same.
    before = random.getstate()
    generator = seed_generator.global_seed_generator()
    random.setstate(before)
    return generator


def with_this_threads_state(fn: Callable) -> Callable:
    """Makes `fn` see this thread's Keras settings in the thread it runs in."""
    # Keras keeps them by thread (backend/common/global_state.py), and each
    # replica has a thread. Both names are set for the whole program, not for
    # a scope.
    names = ("dtype_policy", "global_seed_generator")
    settings = {name: global_state.get_global_attribute(name) for name in names}

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        return fn(*args, **kwargs)

    return run


def symbolic_build(model: keras.Model, spec: Any) -> None:
    """Builds a model, its metrics and its optimizer for batches like `spec`."""
    # Public `model.build` builds neither metrics nor the optimizer.
    try:
        model._symbolic_build(data_batch=spec)
    except Exception as error:
        # Keras cannot trace some models by shapes alone. And a step of the
        # user's own may do without `call`, or take what `call` does not. Both
        # are built by their first step on one device, so they shall be here.
        untraceable = "automatically build the model" in str(error)
        if not untraceable and not _has_own_step(model):
            raise


def _has_own_step(model: keras.Model) -> bool:
    return any(
        getattr(type(model), step) is not getattr(TensorFlowTrainer, step)
        for step in ("train_step", "test_step", "predict_step")
    )


def supports_jit(model: keras.Model) -> bool:
    """Whether Keras holds that XLA can compile a model."""
    return trainer_module.model_supports_jit(model)


def looks_at_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a TensorBoard callback writes or profiles single batches."""
    # `profile_batch` is kept as the first batch to profile.
    return callback.update_freq != "epoch" or callback._start_batch > 0


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
