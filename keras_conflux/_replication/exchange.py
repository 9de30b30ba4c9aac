"""Puts another TensorFlow variable behind a Keras variable."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._replication import state
from keras_conflux._replication import traced_functions
from keras_conflux._replication.strategy import is_replicated


def exchange(variable: keras.Variable, old: Any, new: Any) -> None:
    """Puts a TensorFlow variable in the place of another.

    Args:
        variable: The Keras variable.
        old: What is behind it.
        new: What shall be. It has the value already.
    """
    tensorflow_internals.keep_identity(
        state.copies(old)[0], state.copies(new)[0]
    )
    keras_variables.set_backing(variable, new)
    traced_functions.note_exchange(state.copies(old), state.copies(new))


def demote(variables: Sequence[keras.Variable]) -> None:
    """Puts each variable that is replicated back on one device.

    Args:
        variables: Any Keras variables.
    """
    for variable in variables:
        old = keras_variables.backing(variable)
        if not is_replicated(old):
            continue
        # A strategy's scope may be open here, but not in another thread.
        with ThreadPoolExecutor(1) as thread:
            new = thread.submit(_single, variable, old).result()
        exchange(variable, old, new)


def _single(variable: keras.Variable, old: Any) -> tf.Variable:
    with tf.device(state.copies(old)[0].device):
        # Reading from outside of the replicas adds up a metric's copies.
        return keras_variables.make_backing(variable, tf.convert_to_tensor(old))
