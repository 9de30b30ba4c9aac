"""Whether what replicas exchange is right."""

import argparse
from typing import Any

from keras_conflux.tools.checks.progress import doing
from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong


def check(options: argparse.Namespace) -> Passed:
    """Reduces numbers of which all results are known."""
    import keras_conflux as kc

    devices = kc.devices(options.devices)
    if len(devices) == 1:
        return Passed("one device has nothing to exchange")
    for dtype in ("float32", "int32"):
        for op in ("sum", "mean", "min", "max"):
            if (dtype, op) != ("int32", "mean"):
                _assert_right(devices, op, dtype)
    return Passed("sums, means, minima and maxima are right")


def _assert_right(devices: Any, op: Any, dtype: str) -> None:
    import numpy as np

    import keras_conflux as kc

    doing(f"the {op} of {dtype} over {len(devices)} devices")
    rng = np.random.default_rng(0)
    given = rng.integers(-9, 10, (len(devices), 1000)).astype(dtype)
    if dtype == "float32":
        given[1, 7] = np.nan
    expected = getattr(np, op)(given, axis=0)
    each = kc.Replicas(list(given), devices)
    reduce = kc.withdevices(lambda x: kc.allreduce(op, x), devices=devices)
    for device, found in zip(devices, reduce(each), strict=True):
        if not np.allclose(found, expected, rtol=1e-6, equal_nan=True):
            raise Wrong(
                f"the {op} of {dtype} is wrong on {device}",
                "NCCL_P2P_DISABLE=1 keras-conflux check. If that passes, the "
                "direct access from GPU to GPU is broken, as with some "
                "settings of IOMMU and ACS",
            )
