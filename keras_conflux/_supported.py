"""Compares Keras and TensorFlow with the expected versions, before all else.

The core and the extensions list the private names that they need.
"""

from keras_conflux._compat import private_keras_names
from keras_conflux._compat import private_tensorflow_names
from keras_conflux._compat import versions
from keras_conflux._extensions.common import private_names as common
from keras_conflux._extensions.resume import private_names as resume
from keras_conflux._extensions.sharding import private_names as sharding

NAMES = (
    *private_keras_names.NAMES,
    *private_tensorflow_names.NAMES,
    *common.NAMES,
    *resume.NAMES,
    *sharding.NAMES,
)
"""All of them."""

versions.assert_supported(NAMES)
