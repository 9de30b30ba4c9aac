"""Weights decay by few operations, in programs of XLA.

Keras asks for the learning rate once for each variable. Of a schedule it then
traces the value some hundred times.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._extensions.optimizers import compat
from keras_conflux._replication import steps


def decay(original: Callable, optimizer: Any, variables: list[Any]) -> None:
    """Decays weights as Keras does, but asks for the learning rate once."""
    if not steps.in_xla() or not compat.decays_at_one_rate(optimizer):
        original(optimizer, variables)
        return
    learning_rate = optimizer.learning_rate
    factors = functools.cache(
        lambda dtype: (
            tf.cast(optimizer.weight_decay, dtype),
            tf.cast(learning_rate, dtype),
        )
    )
    for each in variables:
        is_keras = isinstance(each, keras.Variable)
        variable = keras_variables.backing(each) if is_keras else each
        if compat.decays(optimizer, variable):
            weight_decay, rate = factors(variable.dtype)
            # A variable's own method takes longer to trace. The copy of
            # a variable that lies in parts is the replica's part.
            own = tensorflow_internals.copy_that_is_read(variable)
            tf.raw_ops.AssignSubVariableOp(
                resource=own.handle, value=own * weight_decay * rate
            )
