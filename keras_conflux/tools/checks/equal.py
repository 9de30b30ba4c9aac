"""Whether replicas compute what one device computes."""

import argparse

from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong
from keras_conflux.tools.checks.table import doing

_TOLERANCE = 1e-4
"""Larger than the roundings of some steps, and far below any error."""

_REPORT = "`keras-conflux env`, and report both: the package promises this"
_ACCESS = (
    "NCCL_P2P_DISABLE=1 keras-conflux check. If that passes, the direct access "
    "from GPU to GPU is broken, as with some settings of IOMMU and ACS. Else "
)


def check(options: argparse.Namespace) -> Passed:
    """Trains a small model on all devices, and on one."""
    import tensorflow as tf

    import keras_conflux as kc
    from keras_conflux.tools.checks import trainings

    devices = kc.devices(options.devices)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    doing("a training on one device")
    expected = trainings.trained(None, jit_compile=False)
    doing(f"a training on {len(devices)} devices")
    try:
        found = trainings.trained(devices, jit_compile=False)
    except kc.ConfluxError as error:
        raise Wrong(str(error), _REPORT) from None
    difference = trainings.largest_difference(found, expected)
    # Not a comparison that NaN passes.
    if not difference <= _TOLERANCE:
        raise Wrong(
            f"a model that is trained on {len(devices)} devices differs by "
            f"{difference:.1e} from one that is trained on one",
            _ACCESS * (devices[0].kind == "GPU") + _REPORT,
        )
    return Passed(
        f"a training on all devices differs by {difference:.0e} from one "
        "on one device",
        {"difference": difference},
    )
