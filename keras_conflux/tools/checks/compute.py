"""Whether the versions fit, and each device computes."""

import os

from keras_conflux._compat import versions
from keras_conflux._devices.driver import cure
from keras_conflux._devices.driver import unseen
from keras_conflux._devices.driver import visible_gpus
from keras_conflux.tools.checks import Passed
from keras_conflux.tools.checks import Wrong
from keras_conflux.tools.checks import doing
from keras_conflux.tools.checks import nvidia

_SIZE = 512


def check(count: int) -> Passed:
    """Multiplies matrices of small integers, whose product is exact."""
    import keras
    import tensorflow as tf

    import keras_conflux as kc

    gpus = visible_gpus(os.environ)
    seen = len(tf.config.list_physical_devices("GPU"))
    if wrong := unseen(len(gpus), seen):
        raise Wrong(wrong, cure(tf.test.is_built_with_cuda()))
    _refuse_busy_gpus(gpus[:count])
    try:
        devices = kc.devices(count)
    except kc.DeviceError as error:
        again = f"keras-conflux check --devices {len(gpus)}"
        raise Wrong(str(error), again) from None
    names = {device.name for device in devices}
    if len(names) > 1:
        raise Wrong(
            f"the GPUs are not of one kind: {', '.join(sorted(names))}",
            "CUDA_VISIBLE_DEVICES=... with GPUs of one kind: all wait for the "
            "slowest",
        )
    for device in devices:
        _multiply(device)
    kind = devices[0].kind.replace("CPU", "logical CPU device")
    return Passed(
        f"{count} {kind}{'s' * (count > 1)} ({devices[0].name}), each computes "
        f"right; keras-conflux {kc.__version__}, Keras {keras.__version__}, "
        f"TensorFlow {tf.__version__}",
        slow=versions.untested(),
    )


def _multiply(device: str) -> None:
    import numpy as np
    import tensorflow as tf

    doing(f"a product of matrices on {device}")
    numbers = np.random.default_rng(0).integers(-4, 5, (_SIZE, _SIZE))
    expected = numbers @ numbers
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


def _refuse_busy_gpus(used: list[str]) -> None:
    """Refuses GPUs, by number or UUID, on which another process computes."""
    numbers = {uuid: number for number, uuid in nvidia.gpus("index", "uuid")}
    for uuid, pid, name in nvidia.processes():
        if uuid in used or numbers.get(uuid) in used:
            raise Wrong(
                f"process {pid} ({name}) runs on the GPU {numbers[uuid]}",
                f"end it (kill {pid}), or choose other GPUs with "
                "CUDA_VISIBLE_DEVICES",
            )
