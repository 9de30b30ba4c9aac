"""Whether several GPUs are faster than one."""

import argparse
from typing import Any

from keras_conflux.tools.checks.progress import doing
from keras_conflux.tools.checks.table import Passed

_INPUTS = 64
"""Few, so that moving the samples does not take longer than training."""
_WIDTH = 4096
_BATCH = 16384
"""Per GPU; so many that the sum of the gradients is a tenth of a step at most
where NVLink connects the GPUs."""
_STEPS = 64
"""Of an epoch. All are one execution, so that one program is compiled."""
_MEBIBYTES = 64
_REPEATS = 5
_REDUCTIONS = 8, 72
"""In the shorter and the longer of two calls, which take some milliseconds."""
_SLOW_GB_S = 8.0
"""Below this, GPUs do not even have what PCIe 4 gives."""
_LEAST = 0.8
"""The least fraction of linear scaling that is no cause of concern."""

_CONNECTION = "`nvidia-smi topo -m` shows whether NVLink connects the GPUs"


def check(options: argparse.Namespace) -> Passed:
    """Trains a model of large matrices on one GPU, and on all; times a sum.

    CPU devices share one CPU: `keras-conflux check` leaves this out for them.
    """
    import keras_conflux as kc

    devices = kc.devices(options.devices)
    one = _speed(devices[:1])
    all_of_them = _speed(devices)
    ratio = all_of_them["samples_per_second"] / one["samples_per_second"]
    bandwidth = _gigabytes_per_second(devices)
    slow = None
    if ratio < _LEAST * len(devices):
        slow = _reason(all_of_them["input_wait"])
    elif bandwidth < _SLOW_GB_S:
        slow = f"{_CONNECTION}, and NCCL_DEBUG=INFO what NCCL uses of that"
    text = (
        f"{len(devices)} GPUs are {ratio:.2f} times as fast as one; "
        f"{_MEBIBYTES} MiB are summed at {bandwidth:.1f} GB/s"
    )
    return Passed(text, {"ratio": ratio, "gb_per_second": bandwidth}, slow)


def _speed(devices: Any) -> dict[str, float]:
    """Returns the throughput of the fastest epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_conflux as kc

    doing(f"the speed on {', '.join(devices)}")
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [keras.layers.Dense(_WIDTH, "relu") for _ in range(4)]
    model: Any = keras.Sequential(
        [keras.Input((_INPUTS,)), *layers, keras.layers.Dense(1)]
    )
    model.compile(
        keras.optimizers.SGD(1e-3),
        "mse",
        jit_compile=True,
        steps_per_execution=_STEPS,
    )
    kc.replicate(model, devices)
    size = _BATCH * len(devices)
    batch = np.zeros((size, _INPUTS), "float16"), np.zeros((size, 1), "float32")
    data = tf.data.Dataset.from_tensors(batch).repeat(_STEPS)
    history = model.fit(
        data, epochs=3, verbose=0, callbacks=[kc.Throughput()]
    ).history
    speeds = history["samples_per_second"]
    best = max(range(1, 3), key=speeds.__getitem__)  # the first one compiles
    return {
        key: history[key][best] for key in ("samples_per_second", "input_wait")
    }


def _reason(input_wait: float) -> str:
    if input_wait > 0.1:
        return (
            f"{input_wait:.0%} of the time is a wait for input: look for more "
            "CPU cores a GPU (`nproc`), and for what else runs (`top`)"
        )
    return (
        f"{_CONNECTION}, and `nvidia-smi` whether something else runs on them"
    )


def _gigabytes_per_second(devices: Any) -> float:
    import tensorflow as tf

    import keras_conflux as kc
    from keras_conflux.tools.checks import all_reduce_time

    doing(f"all-reduces of {_MEBIBYTES} MiB over {len(devices)} devices")
    copies = kc.replicate([tf.zeros([_MEBIBYTES * 2**18])], devices)
    on_gpu = devices[0].kind == "GPU"  # compiled, as what `fit` runs there
    seconds, _ = all_reduce_time.seconds_each(
        "sum", copies, devices, on_gpu, _REDUCTIONS, _REPEATS
    )
    moved = all_reduce_time.bytes_moved(_MEBIBYTES * 2**20, len(devices))
    return moved / min(seconds) / 1e9
