"""The functions of a backend by which Keras asks for `keras.distribution`."""

import math
import threading
from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._cluster.processes import join_others
from keras_conflux._cluster.processes import process_count
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import patching
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._devices.device import list_devices as all_devices
from keras_conflux._extensions.keras_distribution import compat
from keras_conflux._extensions.keras_distribution import model_parallel
from keras_conflux._replication.strategy import Distributed

_SUPPORTED = (
    "Supported is a copy of the model on each device of a mesh of one axis: "
    "`keras.distribution.DataParallel()` for all devices, or "
    "`DataParallel(devices=[...])`; and weights in parts: "
    "`ModelParallel(layout_map=...)`."
)

_set_here = threading.local()
"""Its `value` is the distribution that was last set in this thread."""


def distributed() -> Distributed | None:
    """Returns the meaning of the distribution that is set, if one is."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        return _meaning_of(distribution)
    ended = vars(_set_here).pop("value", None)
    if ended is not None:
        warn(
            f"`clear_session()` has ended {ended}: models made from here on "
            "lie on one device. After it, set the distribution again with "
            "`keras.distribution.set_distribution`, or give the model to "
            "`keras_conflux.replicate`."
        )
    return None


def set_distribution(original: Callable[..., Any], value: Any) -> None:
    """Refuses a distribution that cannot run, before anything is made."""
    patching.begin()
    if value is not None:
        _meaning_of(value)
    if isinstance(value, keras.distribution.ModelParallel):
        model_parallel.assert_possible(value)
    original(value)
    _set_here.value = value


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
        device_mesh = _flat(device_mesh)
    original(distribution, device_mesh, *args, **kwargs)
    if process_count() > 1:
        # Keras would cut data sets, and refuse other data, before this package.
        compat.take_whole_datasets(distribution)


def get_device_count(device_type: str | None = None) -> int:
    """Returns the number of devices of a kind; of GPUs, if any, by default."""
    return len(keras.distribution.list_devices(device_type))


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the other processes, as `keras_conflux.initialize` does."""
    names = "JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"
    given = zip(names, (job_addresses, num_processes, process_id), strict=True)
    told = {k: str(v) for k, v in given if v is not None}
    join_others({f"KERAS_DISTRIBUTION_{k}": v for k, v in told.items()})


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the names of this process' devices, GPUs if there are any."""
    kind = device_type.upper() if device_type else None
    found = [d for d in all_devices() if kind in (None, d.kind)]
    gpus = [d for d in found if d.kind == "GPU"]
    return [d.lower() for d in gpus or found]


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Returns `tensor`, unless the layout splits another axis than the first.

    A tensor that is split along that is the same to a replica's program.
    """
    mesh = layout.device_mesh
    for axis, name in enumerate(layout.axes):
        if name is not None and mesh is None:
            raise ValueError(
                f"A layout that splits a tensor, here {layout.axes}, needs a "
                "mesh: `TensorLayout(axes, device_mesh=mesh)`."
            )
        if name is None or (axis == 0 and name == _batch_axis(mesh)):
            continue
        if mesh.shape[list(mesh.axis_names).index(name)] > 1:
            raise NotImplementedError(
                f"The layout {layout.axes} splits axis {axis} of a tensor over "
                f"{name!r} of {mesh}. Only the first axis of a tensor, the "
                "batch's, is split here, and over the axis of a mesh that is "
                f"for batches. {model_parallel.MEANING}, so give the outputs "
                f"of layers no layout. {_SUPPORTED}"
            )
    return tensor


def _batch_axis(mesh: keras.distribution.DeviceMesh) -> str:
    distribution = keras.distribution.distribution()
    if distribution is not None and distribution.device_mesh is mesh:
        return distribution.batch_dim_name
    return mesh.axis_names[0]


def _meaning_of(distribution: Any) -> Distributed:
    splits = None
    if isinstance(distribution, keras.distribution.ModelParallel):
        splits = model_parallel.SplitByLayout(distribution)
    elif not isinstance(distribution, keras.distribution.DataParallel):
        raise NotImplementedError(
            "keras-conflux does not know this distribution. Received: "
            f"{distribution!r}. {_SUPPORTED}"
        )
    mesh = distribution.device_mesh
    return Distributed(find_devices(mesh.devices.flatten().tolist()), splits)


def _flat(mesh: keras.distribution.DeviceMesh) -> keras.distribution.DeviceMesh:
    if len(mesh.shape) == 1:
        return mesh
    if math.prod(mesh.shape[1:]) > 1:
        raise NotImplementedError(
            "Data parallelism takes the first axis of a mesh; others must be "
            f"of size 1. Received: {mesh}. {_SUPPORTED}"
        )
    first = mesh.shape[:1], mesh.axis_names[:1]
    return keras.distribution.DeviceMesh(*first, mesh.devices.flatten())
