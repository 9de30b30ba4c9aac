"""Whether each device computes."""

import argparse
import os

from keras_conflux.tools.checks import nvidia
from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong
from keras_conflux.tools.checks.table import doing

_SIZE = 512


def check(options: argparse.Namespace) -> Passed:
    """Multiplies matrices of small integers, whose product is exact."""
    import numpy as np
    import tensorflow as tf

    import keras_conflux as kc

    if options.gpus:
        _refuse_busy_gpus(options.devices, options.running)
    try:
        devices = kc.devices(options.devices)
    except kc.DeviceError as error:
        raise Wrong(
            str(error), f"keras-conflux check --devices {options.gpus}"
        ) from None
    names = {device.name for device in devices}
    if len(names) > 1:
        raise Wrong(
            f"the GPUs are not of one kind: {', '.join(sorted(names))}",
            "CUDA_VISIBLE_DEVICES=... with GPUs of one kind: all wait for the "
            "slowest",
        )
    numbers = np.random.default_rng(0).integers(-4, 5, (_SIZE, _SIZE))
    expected = numbers @ numbers
    for device in devices:
        doing(f"a product of matrices on {device}")
        with tf.device(device):
            given = tf.constant(numbers, tf.float32)
            found = tf.linalg.matmul(given, given).numpy()
        wrong = int((found != expected).sum())
        if wrong:
            raise Wrong(
                f"{device} computes {wrong} of {expected.size} entries of a "
                "product of matrices wrongly",
                "nvidia-smi -q -d ECC,PAGE_RETIREMENT, and leave this GPU out "
                "with CUDA_VISIBLE_DEVICES",
            )
    count = len(devices)
    kind = devices[0].kind
    text = f"{count} {kind}{'s' if count > 1 else ''}"
    if kind == "CPU":
        text = f"{count} logical CPU device{'s' if count > 1 else ''}"
    return Passed(f"{text} ({devices[0].name}), each computes right")


def _refuse_busy_gpus(count: int, running: list[list[str]]) -> None:
    """Refuses GPUs that another process computes on.

    Args:
        count: The number of GPUs to use, the first of the visible ones.
        running: UUID of the GPU, id and name of each process on a GPU.
    """
    uuids = _used(count)
    for uuid, pid, name in running:
        if uuid in uuids:
            raise Wrong(
                f"process {pid} ({name}) runs on the GPU {uuids[uuid]}",
                f"end it (kill {pid}), or choose other GPUs with "
                "CUDA_VISIBLE_DEVICES",
            )


def _used(count: int) -> dict[str, str]:
    """Returns the numbers of the GPUs that are used, by their UUIDs."""
    gpus = nvidia.gpus("index", "uuid")
    names = [index for index, _ in gpus]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
    used = names[:count]
    return {i: n for n, i in gpus if n in used or i in used}
