"""Compares Keras and TensorFlow with the expected versions, before all else.

The core and the extensions list the private names that they need.
"""

import importlib

try:
    importlib.import_module("keras")
except (ImportError, ValueError) as error:  # of another backend
    error.add_note("keras-conflux runs with KERAS_BACKEND=tensorflow only.")
    raise

from keras_conflux._compat import private_keras_names
from keras_conflux._compat import private_tensorflow_names
from keras_conflux._compat import versions
from keras_conflux._extensions.common import private_names

CORE = (*private_keras_names.NAMES, *private_tensorflow_names.NAMES)
"""Without these, nothing works."""

versions.assert_supported(CORE)
MISFITS = versions.misfits(private_names.NAMES)
"""The extensions that do not fit, and why."""
