"""What `keras.distribution` means on TensorFlow: a list of devices.

Its backend functions have the names by which Keras calls them on any backend;
the TensorFlow backend of Keras lacks these.
"""

import math
from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._devices.device import Device
from keras_conflux._devices.device import devices as find_devices

_WHAT_EXISTS = (
    "What exists is a copy of the model on each device of a mesh of one axis: "
    "`keras.distribution.DataParallel()` for all devices, or "
    "`DataParallel(devices=[...])`."
)


def active_devices() -> tuple[Device, ...] | None:
    """Returns the devices of the distribution that is set, `None` if none is.

    Raises:
        DeviceError: If its devices do not exist, repeat or are mixed.
        NotImplementedError: If it is something else than a `DataParallel`.
    """
    distribution = keras.distribution.distribution()
    return None if distribution is None else _devices_of(distribution)


def set_distribution(original: Callable[..., Any], value: Any) -> None:
    """Refuses what cannot run when it is set, before anything is made."""
    if value is not None:
        _devices_of(value)
    original(value)


def make_data_parallel(
    original: Callable[..., Any],
    distribution: Any,
    device_mesh: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Makes a `DataParallel` of a mesh with further axes, all of size 1."""
    # Keras 3.15.1 means to warn of these and dies in the call of `warn`.
    if isinstance(device_mesh, keras.distribution.DeviceMesh):
        device_mesh = _one_axis(device_mesh)
    original(distribution, device_mesh, *args, **kwargs)


def get_device_count(device_type: str | None = None) -> int:
    """Returns the number of devices of a kind; of GPUs, if any, by default."""
    return len(keras.distribution.list_devices(device_type))


def num_processes() -> int:
    """Returns 1: one process drives all devices."""
    return 1


def process_id() -> int:
    """Returns 0: this process is the only one."""
    return 0


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Does nothing for one process, which needs no preparation.

    Args:
        job_addresses: The processes' addresses, separated by commas.
        num_processes: How many processes there are.
        process_id: Which one this is.

    Raises:
        NotImplementedError: If there is more than one process.
    """
    addresses = len(job_addresses.split(",")) if job_addresses else 1
    if max(addresses, num_processes or 1, (process_id or 0) + 1) > 1:
        raise NotImplementedError(
            "One process drives all GPUs of this machine; several processes "
            f"are not built yet. Received: job_addresses={job_addresses!r}, "
            f"num_processes={num_processes}, process_id={process_id}. Start "
            "one process, call `initialize()` without arguments, and unset "
            "the environment variables KERAS_DISTRIBUTION_*."
        )


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Returns `tensor`, where that is what the layout describes.

    A program sees global tensors, and a replica's program its own part of the
    batch. So a tensor that is replicated, or split along its first axis, is
    the same tensor to the program. To split a batch for a loop of your own,
    see `keras_conflux.split`.

    Args:
        tensor: A tensor, or a tree of them.
        layout: A `keras.distribution.TensorLayout`.

    Raises:
        NotImplementedError: If the layout splits another axis.
        ValueError: If it splits an axis and has no mesh.
    """
    split = [
        (axis, name)
        for axis, name in enumerate(layout.axes)
        if name is not None
    ]
    if split and layout.device_mesh is None:
        raise ValueError(
            f"A layout that splits a tensor, here {layout.axes}, needs a mesh: "
            "`TensorLayout(axes, device_mesh=mesh)`."
        )
    for axis, name in split:
        names = list(layout.device_mesh.axis_names)
        is_batch = axis == 0 and name == names[0]
        if not is_batch and layout.device_mesh.shape[names.index(name)] > 1:
            raise NotImplementedError(
                f"The layout {layout.axes} splits axis {axis} of a tensor over "
                f"{name!r} of {layout.device_mesh}. Only the first axis of a "
                "tensor, that of the batch, is split here, and over the first "
                f"axis of a mesh. {_WHAT_EXISTS}"
            )
    return tensor


def _devices_of(distribution: Any) -> tuple[Device, ...]:
    if not isinstance(distribution, keras.distribution.DataParallel):
        raise NotImplementedError(
            "keras-conflux cannot split variables over devices. Received: "
            f"{distribution!r}. {_WHAT_EXISTS}"
        )
    return find_devices(distribution.device_mesh.devices.flatten().tolist())


def _one_axis(
    mesh: keras.distribution.DeviceMesh,
) -> keras.distribution.DeviceMesh:
    if len(mesh.shape) == 1:
        return mesh
    if math.prod(mesh.shape[1:]) > 1:
        raise NotImplementedError(
            "Data parallelism takes the first axis of a mesh; others must be "
            f"of size 1. Received: {mesh}. {_WHAT_EXISTS}"
        )
    return keras.distribution.DeviceMesh(
        mesh.shape[:1], mesh.axis_names[:1], mesh.devices.flatten()
    )
