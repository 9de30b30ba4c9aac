"""Which GPUs and which driver a machine has, without starting TensorFlow.

TensorFlow fixes its settings when it is asked for devices, so it cannot be
asked here. The driver says it in files; some containers hide them, and then its
library is asked.
"""

import ctypes
import pathlib
import re
from typing import Any

from keras_conflux._extensions.program_cache.folders import CacheUnavailable

_FILES = pathlib.Path("/proc/driver/nvidia")
_DEVICES = pathlib.Path("/dev")


def describe(
    files: pathlib.Path = _FILES, devices: pathlib.Path = _DEVICES
) -> dict[str, str]:
    """Returns the model of the GPUs and the version of their driver.

    Args:
        files: Where the driver describes itself.
        devices: Where the GPUs are.

    Raises:
        CacheUnavailable: If there is no NVIDIA GPU, or if there are several
            models. XLA's keys do not name the model, so a program for one
            would be loaded on the other.
    """
    models, driver = _in_files(files)
    if not models and any(devices.glob("nvidia[0-9]*")):
        models, driver = _in_library()
    if not models:
        raise CacheUnavailable("there is no NVIDIA GPU", is_expected=True)
    if len(models) > 1:
        raise CacheUnavailable(
            "this machine has GPUs of several models, and a program for one "
            f"does not run on the others: {', '.join(sorted(models))}"
        )
    return {"GPU": models.pop(), "driver": driver}


def _in_files(folder: pathlib.Path) -> tuple[set[str], str]:
    models = set()
    for path in folder.glob("gpus/*/information"):
        found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(), re.M)
        if found:
            models.add(found[1])
    version = folder / "version"
    lines = version.read_text().splitlines() if version.is_file() else []
    if not lines:
        return set(), ""
    return models, lines[0]


def _in_library() -> tuple[set[str], str]:
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        return _told_by(library)
    except (OSError, AttributeError):  # there is none, or another one
        return set(), ""


def _told_by(library: Any) -> tuple[set[str], str]:
    """Returns the same from the management library of the driver."""
    if library.nvmlInit_v2() != 0:
        return set(), ""
    try:
        text = ctypes.create_string_buffer(96)
        library.nvmlSystemGetDriverVersion(text, len(text))
        driver = text.value.decode()
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        models = set()
        for index in range(count.value):
            device = ctypes.c_void_p()
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
            library.nvmlDeviceGetName(device, text, len(text))
            models.add(text.value.decode())
        return models, driver
    finally:
        library.nvmlShutdown()
