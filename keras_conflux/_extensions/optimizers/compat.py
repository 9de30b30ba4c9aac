"""The insides of Keras that faster updates need."""

import numbers
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat.keras_models import is_of_keras


def decays_at_one_rate(optimizer: Any) -> bool:
    """Whether an optimizer decays all weights by rates known before.

    A weight decay or a learning rate that depends on a variable which is
    trained changes while variables decay, one after another.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        is_known = all(rate is not x for x in optimizer._trainable_variables)
    else:
        is_known = is_of_keras(rate) and all(
            isinstance(setting, _PLAIN)
            for setting in keras.tree.flatten([*vars(rate).values()])
        )
    return is_known and isinstance(optimizer.weight_decay, numbers.Real)


_PLAIN = (numbers.Real, str, type(None))
"""The types of a schedule's settings."""


def decays(optimizer: Any, variable: tf.Variable) -> bool:
    """Whether an optimizer that decays weights decays a variable."""
    return optimizer._use_weight_decay(variable)
