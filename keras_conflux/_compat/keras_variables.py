"""The variables of Keras, its seed, and its state of each thread."""

import functools
import random
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils


def random_seed() -> int | None:
    """Returns the seed that the program has given Keras, if it has."""
    return rng_utils.get_random_seed()


def as_tensor(value: Any, dtype: str | None = None) -> tf.Tensor:
    """Returns a tensor, also for a variable, which Keras leaves one."""
    converted: Any = keras.ops.convert_to_tensor(value, dtype)
    if isinstance(converted, keras.Variable | tf.Variable):
        return tf.convert_to_tensor(converted)
    return converted


def backing(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable that holds a Keras variable's value.

    `None` if it has not been made yet. Autocasting changes `variable.value`.
    """
    return variable._value


def forget_initialized() -> None:
    """Lets Keras build again after a build that was interrupted."""
    name = "uninitialized_variables"
    left = global_state.get_global_attribute(name) or []
    left = [variable for variable in left if backing(variable) is None]
    global_state.set_global_attribute(name, left)


def set_backing(variable: keras.Variable, new: tf.Variable) -> None:
    """Puts another TensorFlow variable under a Keras variable."""
    variable._value = new


def make_backing(
    variable: keras.Variable, value: Any, summed: bool = False
) -> tf.Variable:
    """Makes a TensorFlow variable, perhaps summed, as Keras would."""
    # As in core.Variable._initialize, except that a copy that a replica writes
    # is never reduced on the way: it would be reduced at each writing, and
    # Keras writes a sum by writing the old sum and the summand.
    synchronization = "on_read" if summed else variable.synchronization
    if value.dtype == tf.bool:  # which cannot be added
        synchronization = "auto"
    aggregation = "sum" if summed else variable.aggregation
    if synchronization != "on_read" and aggregation != "only_first_replica":
        aggregation = "none"
    # Freezing a Keras variable leaves TensorFlow's watched by gradient tapes;
    # one that is made while it is frozen must be as well.
    old = backing(variable)
    # Where it was made, its name began with its layer's name, by which
    # optimizers can be told to leave it out of weight decay.
    name = variable.name if old is None else old.name.partition(":")[0]
    return tf.Variable(
        lambda: value,
        dtype=value.dtype,
        trainable=variable.trainable if old is None else old.trainable,
        name=name,
        aggregation=variable._map_aggregation(aggregation),
        synchronization=variable._map_synchronization(synchronization),
    )


def global_seed_generator() -> keras.random.SeedGenerator:
    """Returns the generator behind `keras.random` without a seed."""
    # Made here, outside of any function, for a function makes no variables.
    # Its seed comes from Python's `random`. A model that never asks for it
    # would not have drawn: the seed of a PyDataset's shuffling stays the same.
    before = random.getstate()
    generator = seed_generator.global_seed_generator()
    random.setstate(before)
    return generator


def with_this_threads_state(fn: Callable) -> Callable:
    """Makes `fn` see this thread's Keras settings in the thread it runs in."""
    # Keras keeps them by thread (backend/common/global_state.py), and each
    # replica has a thread. Both names are of the program, not of a scope.
    names = ("dtype_policy", "global_seed_generator")
    settings = {name: global_state.get_global_attribute(name) for name in names}

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        return fn(*args, **kwargs)

    return run
