"""Whether the installed versions fit."""

import argparse

from keras_conflux._compat import versions
from keras_conflux._devices.driver import cure
from keras_conflux._devices.driver import unseen
from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong


def check(options: argparse.Namespace) -> Passed:
    """Compares versions, and looks for GPUs that TensorFlow does not see.

    Importing the package has shown that all that it relies on is there.
    """
    import keras
    import tensorflow as tf

    import keras_conflux as kc

    seen = len(tf.config.list_physical_devices("GPU"))
    wrong = unseen(options.gpus, seen)
    if wrong:
        raise Wrong(wrong, cure(tf.test.is_built_with_cuda()))
    return Passed(
        f"keras-conflux {kc.__version__}, Keras {keras.__version__}, "
        f"TensorFlow {tf.__version__}",
        slow=versions.untested(),
    )
