"""Whether replicas compute what one device computes, also in an XLA program."""

import warnings
from typing import Any

from keras_conflux.tools.checks import Passed
from keras_conflux.tools.checks import Wrong
from keras_conflux.tools.checks import doing

_TOLERANCE = 1e-4
"""Larger than the roundings of some steps, and far below any error."""
_XLA_TOLERANCE = 1e-3
"""XLA joins operations, and rounds less often."""

_REPORT = "`keras-conflux env`, and report both: the package promises this"
_ACCESS = (
    "NCCL_P2P_DISABLE=1 keras-conflux check. If that passes, the direct access "
    "from GPU to GPU is broken, as with some settings of IOMMU and ACS. Else "
)
_WITHOUT_XLA = (
    "pip install 'tensorflow[and-cuda]', which brings the compiler that XLA "
    "needs, or compile models with `jit_compile=False`"
)


def check(count: int) -> Passed:
    """Trains a small model on all devices, and on one."""
    import keras_conflux as kc

    devices = kc.devices(count)
    on_gpu = devices[0].kind == "GPU"
    difference, expected = compare(count, on_gpu)
    # Several CPU devices have no program of XLA.
    _compare_with_xla(devices if on_gpu else devices[:1], expected)
    return Passed(
        f"a training on all devices differs by {difference:.0e} from one on "
        f"one device, and XLA compiles it{'' if on_gpu else ' for one'}",
        {"difference": difference},
    )


def compare(count: int, on_gpu: bool = False) -> tuple[float, list[Any]]:
    """Trains without XLA, and raises `Wrong` if the results differ.

    Returns the largest difference, and what one device has learned.
    """
    import tensorflow as tf

    import keras_conflux as kc

    devices = kc.devices(count)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    doing("a training on one device")
    expected = _trained(None, jit_compile=False)
    doing(f"a training on {count} devices")
    try:
        found = _trained(devices, jit_compile=False)
    except kc.ConfluxError as error:
        raise Wrong(str(error), _REPORT) from None
    difference = _largest_difference(found, expected)
    # Not a comparison that NaN passes.
    if not difference <= _TOLERANCE:
        raise Wrong(
            f"a model that is trained on {count} devices differs by "
            f"{difference:.1e} from one that is trained on one",
            _ACCESS * on_gpu + _REPORT,
        )
    return difference, expected


def _compare_with_xla(devices: Any, expected: Any) -> None:
    import keras_conflux as kc

    doing(f"a training with XLA on {', '.join(devices)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        found = _trained(devices, jit_compile=True)
    for each in caught:
        if issubclass(each.category, kc.ConfluxWarning):
            raise Wrong(str(each.message), _WITHOUT_XLA)
    difference = _largest_difference(found, expected)
    if not difference <= _XLA_TOLERANCE:
        raise Wrong(
            f"with XLA a training differs by {difference:.1e}",
            f"compile models with `jit_compile=False`, type {_REPORT}",
        )


def _trained(devices: Any, jit_compile: bool) -> list[Any]:
    """Returns what a model learns of uneven batches, also on no replicas."""
    import keras
    import numpy as np

    import keras_conflux as kc

    keras.utils.set_random_seed(1)
    model: Any = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "tanh"),
            keras.layers.BatchNormalization(synchronized=devices is not None),
            keras.layers.Dense(1),
        ]
    )
    # Adam and clipping would hide gradients that are too large everywhere.
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    if devices is not None:
        kc.replicate(model, devices)
    x = np.random.default_rng(0).normal(size=(59, 8)).astype("float32")
    y = x[:, :1] * 2 + np.sin(x[:, 1:2])
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    losses = model.fit(x, y, **fit).history["loss"]
    if devices is not None:
        kc.assert_in_sync(model)
    return [np.array(losses), *model.get_weights()]


def _largest_difference(found: list[Any], expected: list[Any]) -> float:
    """Returns the largest difference, relative to each array's largest."""
    return max(
        float(abs(one - two).max() / max(abs(two).max(), 1e-3))
        for one, two in zip(found, expected, strict=True)
    )
