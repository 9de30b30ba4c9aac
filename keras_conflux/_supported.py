"""Compares Keras and TensorFlow with the expected versions, before all else.

The core and the extensions list the private names that they need.
"""

from keras_conflux._compat import private_keras_names
from keras_conflux._compat import private_tensorflow_names
from keras_conflux._compat import versions
from keras_conflux._extensions.common import private_names

NAMES = (
    *private_keras_names.NAMES,
    *private_tensorflow_names.NAMES,
    *private_names.NAMES,
)
"""All of them."""

versions.assert_supported(NAMES)
