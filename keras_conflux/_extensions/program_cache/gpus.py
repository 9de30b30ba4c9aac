"""Which GPUs and which driver a machine has, without starting TensorFlow.

TensorFlow fixes its settings when it is asked for devices, so it cannot be
asked here. The driver says it in files; some containers hide them, and then
nvidia-smi is asked.
"""

import pathlib
import re

from keras_conflux._devices.driver import nvidia_smi
from keras_conflux._extensions.program_cache.folders import CacheUnavailable

_FILES = pathlib.Path("/proc/driver/nvidia")
_DEVICES = pathlib.Path("/dev")


def describe(
    files: pathlib.Path = _FILES, devices: pathlib.Path = _DEVICES
) -> dict[str, str]:
    """Returns the model of the GPUs and the version of their driver.

    Args:
        files: The folder in which the driver describes itself.
        devices: The folder of the GPUs' devices.

    Raises:
        CacheUnavailable: If there is no NVIDIA GPU, or if there are several
            models. XLA's keys do not name the model, so a program for one
            would be loaded on the other.
    """
    models, driver = _in_files(files)
    if not models and any(devices.glob("nvidia[0-9]*")):
        models, driver = _by_nvidia_smi()
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


def _by_nvidia_smi() -> tuple[set[str], str]:
    listed = nvidia_smi(
        "--query-gpu=driver_version,name", "--format=csv,noheader"
    )
    rows = [line.partition(", ") for line in listed.splitlines()]
    return {name for _, _, name in rows}, rows[0][0] if rows else ""
