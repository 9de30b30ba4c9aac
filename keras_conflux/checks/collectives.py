"""Whether what replicas exchange is right, and how fast it is."""

import argparse
import time
from typing import Any

from keras_conflux.checks.progress import doing
from keras_conflux.checks.table import Passed
from keras_conflux.checks.table import Wrong

_MEBIBYTES = 64
_REPEATS = 5
_IN_A_CALL = 16
"""All-reduces per call, which itself takes some milliseconds."""
_SLOW_GB_S = 8.0
"""Below this, GPUs do not even have what PCIe 4 gives."""


def check(options: argparse.Namespace) -> Passed:
    """Reduces numbers of which all results are known, and times 64 MiB."""
    import keras_conflux as kc

    devices = kc.devices(options.devices)
    if len(devices) == 1:
        return Passed("one device has nothing to exchange")
    for dtype in ("float32", "int32"):
        for op in ("sum", "mean", "min", "max"):
            if (dtype, op) != ("int32", "mean"):
                _assert_right(devices, op, dtype)
    if devices[0].kind == "CPU":
        return Passed("sums, means, minima and maxima are right")
    speed = _gigabytes_per_second(devices)
    slow = None
    if speed < _SLOW_GB_S:
        slow = (
            "`nvidia-smi topo -m` shows how the GPUs are connected, and "
            "NCCL_DEBUG=INFO what NCCL uses of that"
        )
    return Passed(
        f"all-reduces are right; {_MEBIBYTES} MiB at {speed:.1f} GB/s",
        {"gb_per_second": speed},
        slow,
    )


def _assert_right(devices: Any, op: str, dtype: str) -> None:
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
                "NCCL_P2P_DISABLE=1 conflux check. If that passes, the direct "
                "access from GPU to GPU is broken, as with some settings of "
                "IOMMU and ACS",
            )


def _gigabytes_per_second(devices: Any) -> float:
    import tensorflow as tf

    import keras_conflux as kc

    doing(f"all-reduces of {_MEBIBYTES} MiB over {len(devices)} devices")
    copies = kc.replicate(tf.zeros([_MEBIBYTES * 2**18]), devices)

    def in_a_row(x: Any) -> Any:
        for _ in range(_IN_A_CALL):
            x = kc.allreduce("sum", x)
        return x

    reduce = kc.withdevices(in_a_row, devices=devices)
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        for each in reduce(copies):
            each[:1].numpy()  # waits
        seconds.append(time.perf_counter() - began)
    # What a ring of the devices moves over each connection.
    moved = _MEBIBYTES * 2**20 * 2 * (1 - 1 / len(devices))
    return moved * _IN_A_CALL / min(seconds[1:]) / 1e9
