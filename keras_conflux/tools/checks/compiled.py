"""Whether XLA compiles a step, and the step then computes the same."""

import argparse
import warnings

from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong
from keras_conflux.tools.checks.table import doing

_TOLERANCE = 1e-3
"""XLA joins operations, and rounds less often."""


def check(options: argparse.Namespace) -> Passed:
    """Trains a small model in a program of XLA, and without."""
    import tensorflow as tf

    import keras_conflux as kc
    from keras_conflux.tools.checks import trainings

    devices = kc.devices(options.devices)
    on_gpu = devices[0].kind == "GPU"
    if not on_gpu:
        devices = devices[:1]
    tf.config.experimental.enable_tensor_float_32_execution(False)
    doing("a training without XLA")
    expected = trainings.trained(None, jit_compile=False)
    doing(f"a training with XLA on {', '.join(devices)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        found = trainings.trained(devices, jit_compile=True)
    for each in caught:
        if issubclass(each.category, kc.ConfluxWarning):
            raise Wrong(
                str(each.message),
                "pip install 'tensorflow[and-cuda]', which brings the compiler "
                "that XLA needs, or compile models with `jit_compile=False`",
            )
    difference = trainings.largest_difference(found, expected)
    if not difference <= _TOLERANCE:
        raise Wrong(
            f"with XLA a training differs by {difference:.1e}",
            "compile models with `jit_compile=False`, and report this with "
            "the output of `keras-conflux env`",
        )
    where = "all devices" if on_gpu else "one CPU device; several have none"
    return Passed(f"XLA compiles a step on {where}")
