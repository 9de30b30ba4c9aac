"""Compares Keras and TensorFlow with what is expected, before all else.

The core and each extension list the private names that they need.
"""

from keras_conflux._compat import private_keras_names
from keras_conflux._compat import private_tensorflow_names
from keras_conflux._compat import versions
from keras_conflux._extensions.keras_distribution import (
    private_names as keras_distribution,
)
from keras_conflux._extensions.kernels import private_names as kernels
from keras_conflux._extensions.memory import private_names as memory
from keras_conflux._extensions.optimizers import private_names as optimizers
from keras_conflux._extensions.program_cache import (
    private_names as program_cache,
)
from keras_conflux._extensions.recomputation import (
    private_names as recomputation,
)
from keras_conflux._extensions.resume import private_names as resume
from keras_conflux._extensions.sharding import private_names as sharding

NAMES = (
    *private_keras_names.NAMES,
    *private_tensorflow_names.NAMES,
    *keras_distribution.NAMES,
    *kernels.NAMES,
    *memory.NAMES,
    *optimizers.NAMES,
    *program_cache.NAMES,
    *recomputation.NAMES,
    *resume.NAMES,
    *sharding.NAMES,
)
"""All of them."""

versions.assert_supported(NAMES)
