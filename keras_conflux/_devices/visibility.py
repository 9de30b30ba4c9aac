"""Takes some of the machine's GPUs, and leaves the others alone."""

import numbers
import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._common.errors import DeviceError
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._devices.device import physical


def claim(
    devices: DevicesLike = None, *, grow: bool = True
) -> tuple[Device, ...]:
    """Hides all GPUs but these from TensorFlow, and lets their memory grow.

    Without it TensorFlow takes nearly all memory of every GPU that it sees
    when it makes its first tensor, also of those that are never used. Call
    this at the start of the program, where GPUs are shared with others.

    The GPUs that are left count from 0, as with `CUDA_VISIBLE_DEVICES`: after
    `claim([1, 3])` there are `"GPU:0"` and `"GPU:1"` until the process ends.

    Args:
        devices: See `keras_conflux.devices`; by default all GPUs. A number
            means a GPU, always. If CPU devices are named, all GPUs are hidden.
        grow: Whether to take memory as it is needed, on all of these GPUs,
            and not all at once. `False` leaves the setting as it is. The
            environment variable `TF_FORCE_GPU_ALLOW_GROWTH` beats both.

    Returns:
        The devices by their new names, in the order of `devices`.

    Raises:
        DeviceError: If a device does not exist, if GPUs are named by number
            and TensorFlow sees none, if a GPU has been divided into logical
            ones, or if TensorFlow has started with other settings, as it
            cannot change them then.

    Example:
        ```python
        mine = kc.claim()  # or claim([1, 3]), at the start of the program
        model = kc.replicate(build_model(), devices=mine)
        ```
    """
    _check_numbers(devices)
    chosen = find_devices(devices)
    gpus = [physical(device) for device in chosen if device.kind == "GPU"]
    _check_undivided(gpus)
    in_order = [x for x in tf.config.list_physical_devices("GPU") if x in gpus]
    try:
        # First: growth may not differ between GPUs that TensorFlow sees.
        tf.config.set_visible_devices(in_order, "GPU")
        for gpu in gpus if grow else ():
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise DeviceError(
            f"`claim` was asked for {', '.join(chosen)}, but TensorFlow has "
            "started, and has taken its GPUs with the settings of then. Call "
            "it at the start of the program, before any model or tensor is "
            "made, or set CUDA_VISIBLE_DEVICES and "
            "TF_FORCE_GPU_ALLOW_GROWTH=true before starting it."
        ) from error
    if not gpus:
        return chosen
    return tuple(Device(f"GPU:{in_order.index(gpu)}") for gpu in gpus)


def _check_numbers(devices: DevicesLike) -> None:
    """Raises where a number, which means a GPU, would mean a CPU device."""
    if devices is None or tf.config.get_visible_devices("GPU"):
        return
    items: Any = devices.split(",") if isinstance(devices, str) else devices
    listed = [items] if isinstance(items, numbers.Integral) else items
    if not isinstance(listed, Iterable):
        return  # `devices` refuses it
    if any(not re.search("[A-Za-z]", str(item)) for item in listed):
        raise DeviceError(
            f"`claim({devices!r})` names GPUs by number, and TensorFlow sees "
            "none. Write `claim()` for a program that takes all GPUs, and CPU "
            "devices where there is none. To use CPU devices, leave out "
            "`claim`."
        )


def _check_undivided(gpus: list[Any]) -> None:
    for gpu in gpus:
        if tf.config.get_logical_device_configuration(gpu):
            raise DeviceError(
                f"{gpu.name} has been divided into logical devices with a "
                "memory limit each, which do not grow, and can be hidden "
                "together only. Leave out `claim`, and call "
                "`tf.config.set_visible_devices` yourself."
            )
