"""Whether what is installed fits."""

import argparse
from importlib import metadata

from keras_conflux._compat import versions
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
    if options.gpus > seen:
        raise Wrong(
            f"the driver lists {options.gpus} GPUs, and TensorFlow sees {seen}",
            _todo_for_gpus(tf.test.is_built_with_cuda()),
        )
    return Passed(
        f"keras-conflux {kc.__version__}, Keras {keras.__version__}, "
        f"TensorFlow {tf.__version__}",
        slow=versions.untested(),
    )


def _todo_for_gpus(for_cuda: bool) -> str:
    if not for_cuda:
        return "pip install 'tensorflow[and-cuda]'; this one has no CUDA"
    installed = {each.name for each in metadata.distributions()}
    if not any(name.startswith("nvidia-cudnn") for name in installed):
        return "pip install 'tensorflow[and-cuda]'; cuDNN is not installed"
    return (
        "`python -c 'import tensorflow as tf; "
        'tf.config.list_logical_devices("GPU")\'`, which prints what could not '
        "be loaded; often the driver is older than TensorFlow's CUDA"
    )
