"""Variables of the package's own, as those that keep collectives in order.

Each replica has its own, and its steps write them. Whoever asks what a step of
the user's writes leaves them out.
"""

import weakref
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_internals

_counters: Any = weakref.WeakValueDictionary()


def new_counter(device: str, value: Any = 0) -> tf.Variable:
    """Returns a new variable of one replica.

    Args:
        device: Where it lies.
        value: What it begins with.
    """
    with tf.device(device):
        made = tf.Variable(tf.constant(value), trainable=False)
    _counters[id(tensorflow_internals.handle_of(made))] = made
    return made


def is_counter(handle: Any) -> bool:
    """Whether a handle is that of such a variable."""
    return id(handle) in _counters
