"""Lists devices, and turns a user's description into a list of them."""

import numbers
import os
import platform
import re
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import SupportsIndex
from typing import TypeAlias
from typing import TypeGuard

import numpy as np
import tensorflow as tf

from keras_conflux._common.errors import DeviceError
from keras_conflux._compat import tensorflow_internals

DevicesLike: TypeAlias = (
    "SupportsIndex | str | Sequence[SupportsIndex | str] | None"
)
"""A description of devices: `None` or `"all"`, `"gpu"`, `"cpu"`, a count,
`"0,2"`, `[0, 2]`, or names such as `["GPU:0", "GPU:1"]`."""

_SPELLINGS = (
    "Write a count such as 2, indices such as [0, 2] or '0,2', names such as "
    "'GPU:0' or ['CPU:0', 'CPU:1'], 'gpu' or 'cpu' for all of a kind, or "
    "'all' or nothing for all."
)

_NAME = re.compile(r"(?:^|[/:])(CPU|GPU):(\d+)$", re.IGNORECASE)
_known: set[tuple["Device", ...]] = set()
"""The devices found since TensorFlow started, after which all remains."""


class Device(str):
    """The short name of a device, such as `"GPU:0"`, fit for `tf.device`.

    It is a string that also tells what the device is, as in MLDataDevices.jl.
    `devices` and `list_devices` return such names.

    Example:
        ```python
        device = kc.devices()[0]
        print(device, device.kind, device.ordinal, device.name)
        with tf.device(device):
            weights = tf.ones((3,))
        ```
    """

    __slots__ = ()

    @property
    def kind(self) -> str:
        """`"GPU"` or `"CPU"`."""
        return self.split(":")[0]

    @property
    def ordinal(self) -> int:
        """Position among the devices of its kind, from 0."""
        return int(self.split(":")[1])

    @property
    def name(self) -> str:
        """The model of the device, such as `"NVIDIA H200"` or `"x86_64"`.

        Raises:
            DeviceError: If the device does not exist.
        """
        details = tf.config.experimental.get_device_details(physical(self))
        return details.get("device_name") or platform.machine()

    @property
    def memory(self) -> int | None:
        """How many bytes TensorFlow may use: a GPU's own, the host's for a CPU.

        `None` for a GPU before TensorFlow has started, as it tells only of
        GPUs that it has taken.

        Example:
            ```python
            for device in kc.devices():
                gigabytes = (device.memory or 0) / 1e9
                print(f"{device}: {device.name}, {gigabytes:.0f} GB")
            ```
        """
        if self.kind == "GPU":
            started = tensorflow_internals.has_started()
            return tensorflow_internals.memory_of(self) if started else None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def list_devices() -> tuple[Device, ...]:
    """Returns all devices that TensorFlow sees, GPUs first, then CPUs.

    `keras_conflux.devices()` has those that `replicate` uses. To ask does not
    start TensorFlow, so no memory of a GPU is taken yet.

    Returns:
        The devices, by number within each kind.

    Example:
        ```python
        gpus = [d for d in kc.list_devices() if d.kind == "GPU"]
        print(f"{len(gpus)} GPUs of {kc.list_devices()}")
        ```
    """
    return _existing("GPU") + _existing("CPU")


def devices(which: DevicesLike = None) -> tuple[Device, ...]:
    """Returns the devices that `which` stands for, in its order.

    A number means a GPU, or a CPU device on a machine without GPUs. There, a
    count above the number of CPU devices makes as many logical ones, which
    is possible only before TensorFlow has started. To ask does not start it,
    so GPUs are not taken yet: see `keras_conflux.claim`.

    Args:
        which: `None` or `"all"` for all GPUs, or all CPU devices where there
            is no GPU; `"gpu"` or `"cpu"` for all of that kind; a count for
            the first so many; indices as `"0,2"` or `[0, 2]`; or names as
            `"GPU:0"`. A string of one number is refused, as it may mean a
            count or an index. `CUDA_VISIBLE_DEVICES` and
            `tf.config.set_visible_devices` have already been applied.

    Returns:
        The devices, which are strings such as `"GPU:0"`.

    Raises:
        DeviceError: If a device does not exist, repeats or is of another kind
            than the others, if there is none, if `which` is none of these
            spellings, or if TensorFlow has started before CPU devices are made.

    Example:
        ```python
        kc.devices()  # all GPUs, or all CPU devices
        kc.devices(2)  # the first two
        kc.devices("0,2")  # by index
        kc.devices(["CPU:1", "CPU:0"])  # by name
        ```
    """
    if _are_known(which):
        return which
    kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    if which is None or (isinstance(which, str) and which == "all"):
        return _existing(kind)
    if isinstance(which, str) and which.upper() in ("GPU", "CPU"):
        return _all_of(which.upper())
    if isinstance(which, str):
        which = _parts(which)
    elif isinstance(which, bool | np.bool_):
        raise DeviceError(f"`devices` must not be a bool. Received: {which}")
    elif isinstance(which, numbers.Integral):
        return _first(kind, int(which))
    elif not isinstance(which, Iterable):
        raise DeviceError(
            f"{which!r} does not name devices. {_SPELLINGS} "
            "`replicate` takes one object per call, or a list of them."
        )
    chosen = tuple(_parse(item, kind) for item in which)
    _check(chosen)
    if tensorflow_internals.has_started():
        _known.add(chosen)
    return chosen


def _are_known(which: Any) -> TypeGuard[tuple[Device, ...]]:
    """Whether `devices` has returned this, which is asked for in each call."""
    return (
        isinstance(which, tuple)
        and all(isinstance(each, Device) for each in which)
        and which in _known
    )


def _parts(which: str) -> list[str]:
    """Splits a string of device names at its commas."""
    if which.strip().isdigit():
        raise DeviceError(
            f"`devices={which!r}` may mean a count or an index. Write "
            f"{int(which)} for the first {int(which)} devices, or "
            f"[{int(which)}] for the device with this index."
        )
    return [part for part in which.replace(" ", "").split(",") if part]


def _existing(kind: str) -> tuple[Device, ...]:
    count = len(_physical_of_each(kind))
    return tuple(Device(f"{kind}:{index}") for index in range(count))


def _physical_of_each(kind: str) -> list[Any]:
    # `list_logical_devices` would tell how many there are, and take all GPUs.
    # TensorFlow counts in its own list's order, not in the visible devices'.
    visible = tf.config.get_visible_devices(kind)
    return [
        device
        for device in tf.config.list_physical_devices(kind)
        if device in visible
        for _ in tf.config.get_logical_device_configuration(device) or [None]
    ]


def compute_capability(device: Device) -> tuple[int, int] | None:
    """Returns a CUDA GPU's compute capability, as `(9, 0)`; else `None`."""
    if device.kind != "GPU":
        return None
    details = tf.config.experimental.get_device_details(physical(device))
    return details.get("compute_capability")


def physical(device: Device) -> Any:
    """Returns the `PhysicalDevice` that a logical device is part of."""
    _check([device])
    return _physical_of_each(device.kind)[device.ordinal]


def _all_of(kind: str) -> tuple[Device, ...]:
    existing = _existing(kind)
    if not existing:
        raise DeviceError(
            f"All devices of kind {kind} were asked for, and TensorFlow sees "
            f"only {', '.join(list_devices())}. Leave `devices` out to use "
            "GPUs where there are some and CPU devices elsewhere."
        )
    return existing


def _first(kind: str, count: int) -> tuple[Device, ...]:
    if count < 1:
        raise DeviceError(
            f"A count of devices is at least 1. Received: {count}. {_SPELLINGS}"
        )
    if kind == "CPU" and count > 1:
        _make_logical_cpus(count)
    existing = _existing(kind)
    if count > len(existing):
        raise DeviceError(
            f"{count} {kind} devices were asked for, but there are "
            f"{len(existing)}: {', '.join(existing)}. Ask for fewer, or for "
            "all with `devices=None`."
        )
    return existing[:count]


def _make_logical_cpus(count: int) -> None:
    cpu = tf.config.get_visible_devices("CPU")[0]
    made = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(made) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError as error:
        raise DeviceError(
            f"{count} logical CPU devices are needed and {len(made)} "
            "exist, but TensorFlow has started, after which no more can be "
            f"made. Call `keras_conflux.devices({count})` at the start of the "
            "program, before `initialize` and any model or tensor."
        ) from error
    _make_threads_for(count)


def _make_threads_for(count: int) -> None:
    """Gives TensorFlow more threads than replicas can keep waiting.

    Each may hold one in a `tf.py_function`, whose ops need another.
    """
    chosen = tf.config.threading.get_inter_op_parallelism_threads()
    if chosen == 0 and (os.cpu_count() or 1) <= count:
        tf.config.threading.set_inter_op_parallelism_threads(count + 1)


def _parse(item: SupportsIndex | str, kind: str) -> Device:
    if isinstance(item, numbers.Integral) or str(item).isdigit():
        return Device(f"{kind}:{int(item)}")
    match = _NAME.search(str(item))
    if match is None:
        raise DeviceError(f"{item!r} is not a device. {_SPELLINGS}")
    return Device(f"{match[1].upper()}:{int(match[2])}")


def _check(chosen: Sequence[Device]) -> None:
    if not chosen:
        raise DeviceError("An empty list of devices was given. Name one.")
    repeated = sorted({d for d in chosen if chosen.count(d) > 1})
    if repeated:
        raise DeviceError(
            f"A device may be named once. Repeated: {', '.join(repeated)} in "
            f"[{', '.join(chosen)}]."
        )
    kinds = {device.kind for device in chosen}
    if len(kinds) > 1:
        raise DeviceError(
            "Devices must be of one kind, all GPU or all CPU. Received: "
            f"[{', '.join(chosen)}]."
        )
    (kind,) = kinds
    if kind == "CPU" and max(d.ordinal for d in chosen) > 0:
        _make_logical_cpus(max(d.ordinal for d in chosen) + 1)
    existing = _existing(kind)
    for device in chosen:
        if device not in existing:
            raise DeviceError(
                f"There is no device {device}. The devices are: "
                f"{', '.join(list_devices())}."
            )


def short_name(name: str) -> Device:
    """Returns `Device("GPU:0")` for any of TensorFlow's spellings of it."""
    return _parse(name, "CPU")
