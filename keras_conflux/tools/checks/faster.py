"""Whether several GPUs are faster than one."""

from typing import Any

from keras_conflux.tools.checks import Passed
from keras_conflux.tools.checks import doing

_INPUTS = 64
"""Few, so that moving the samples does not take longer than training."""
_WIDTH = 4096
_BATCH = 16384
"""Per GPU; with so many, NVLink sums gradients in a tenth of a step at most."""
_STEPS = 64
"""An epoch's steps. All are one execution, with one compiled program."""
_LEAST = 0.8
"""The least fraction of linear scaling that is no cause of concern."""


def check(count: int) -> Passed:
    """Trains a model of large matrices on one GPU, and on all.

    CPU devices share one CPU: `keras-conflux check` leaves this out for them.
    """
    import keras_conflux as kc

    devices = kc.devices(count)
    one = _speed(devices[:1])
    all_of_them = _speed(devices)
    ratio = all_of_them["samples_per_second"] / one["samples_per_second"]
    slow = None
    if ratio < _LEAST * count:
        slow = _reason(all_of_them["input_wait"])
    text = f"{count} GPUs are {ratio:.2f} times as fast as one"
    return Passed(text, {"ratio": ratio}, slow)


def _speed(devices: Any) -> dict[str, float]:
    """Returns the throughput of the fastest epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_conflux as kc

    doing(f"the speed on {', '.join(devices)}")
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [keras.layers.Dense(_WIDTH, "relu") for _ in range(4)]
    layers = [keras.Input((_INPUTS,)), *layers, keras.layers.Dense(1)]
    model: Any = keras.Sequential(layers)
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
    told = model.fit(data, epochs=3, verbose=0, callbacks=[kc.Throughput()])
    history = told.history
    speeds = history["samples_per_second"]
    best = max(range(1, 3), key=speeds.__getitem__)  # the first one compiles
    return {k: history[k][best] for k in ("samples_per_second", "input_wait")}


def _reason(input_wait: float) -> str:
    if input_wait > 0.1:
        return (
            f"{input_wait:.0%} of the time is a wait for input: look for more "
            "CPU cores a GPU (`nproc`), and for other programs (`top`)"
        )
    return (
        "`nvidia-smi topo -m` shows whether NVLink connects the GPUs, "
        "NCCL_DEBUG=INFO what NCCL uses of that, and `nvidia-smi` whether "
        "something else runs on them"
    )
