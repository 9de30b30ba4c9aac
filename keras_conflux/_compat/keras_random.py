"""How the functions of `keras.random` come to a seed."""

from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import random
from keras.src.random import seed_generator


def drawn_seed(seed: Any) -> tf.Tensor:
    """Returns what Keras gives to TensorFlow for a seed: two int32.

    Args:
        seed: An integer, a generator, which counts on, or `None`.
    """
    drawn: Any = seed_generator.draw_seed(seed)
    return random._cast_seed(drawn)
