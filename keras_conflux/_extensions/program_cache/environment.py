"""The facts that a compiled program depends on besides its source.

A change of any leads to another folder. TensorFlow fixes its settings when it
is asked for devices, so the driver tells the GPUs, in files or by nvidia-smi.
"""

import hashlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from keras_conflux._devices.driver import nvidia_smi
from keras_conflux._extensions.program_cache.folders import CacheUnavailable

_SETTINGS = (
    *("CUDNN_", "NVIDIA_TF32_", "TF_CUDNN_", "TF_DETERMINISTIC_"),
    *("TF_DISABLE_", "TF_ENABLE_", "TF_XLA_", "XLA_"),
)
"""Beginnings of environment variables that change executables."""

_LIBRARIES = "libcudnn.so.*", "libcublas.so.*", "libcudart.so.*", "libnccl.so.*"
_LIBRARY_FOLDERS = (
    *(f"{sys.prefix}/lib", "/usr/lib64", "/usr/local/cuda/lib64"),
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"),
)

_FILES = pathlib.Path("/proc/driver/nvidia")
_DEVICES = pathlib.Path("/dev")


def facts(
    environ: Mapping[str, str], version: str, hardware: Mapping[str, str]
) -> dict[str, Any]:
    """Returns all of these facts, with the flags of users alone."""
    return {
        "keras-conflux": version,
        "TensorFlow": [tf.version.VERSION, tf.version.GIT_VERSION],
        **hardware,
        # Parts of a GPU differ from a whole GPU in their names only.
        "part of a GPU": [
            name
            for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if name.startswith("MIG")
        ],
        "libraries": _libraries(environ) if "GPU" in hardware else [],
        "settings": {x: environ[x] for x in environ if x.startswith(_SETTINGS)},
    }


def digest(facts: Mapping[str, Any]) -> str:
    """Returns a short name that changes with any fact."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _libraries(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of CUDA's packages and files, which have versions."""
    found = {
        path.name
        for folder in sys.path
        for path in pathlib.Path(folder or ".").glob("nvidia_*.dist-info")
    }
    given = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for folder in (*filter(None, given), *_LIBRARY_FOLDERS):
        for lib in _LIBRARIES:
            found |= {str(x.resolve()) for x in pathlib.Path(folder).glob(lib)}
    if not any("cudnn" in name for name in found):
        raise CacheUnavailable(
            "no installed cuDNN was found, and programs depend on its version"
        )
    # Which compiler of CUDA's is found first depends on this link.
    return [*sorted(found), os.path.realpath("/usr/local/cuda")]


def gpus() -> dict[str, str]:
    """Returns the model of the GPUs and the version of their driver."""
    models, driver = _in_files()
    if not models and any(_DEVICES.glob("nvidia[0-9]*")):
        models, driver = _by_nvidia_smi()
    if not models:
        raise CacheUnavailable("there is no NVIDIA GPU", is_expected=True)
    if len(models) > 1:
        raise CacheUnavailable(
            "this machine has GPUs of several models, and a program for one "
            f"does not run on the others: {', '.join(sorted(models))}"
        )
    return {"GPU": models.pop(), "driver": driver}


def _in_files() -> tuple[set[str], str]:
    told = [path.read_text() for path in _FILES.glob("gpus/*/information")]
    models = {*re.findall(r"^Model:\s*(.+?)\s*$", "\n".join(told), re.M)}
    version = _FILES / "version"
    lines = version.read_text().splitlines() if version.is_file() else []
    return (models, lines[0]) if lines else (set(), "")


def _by_nvidia_smi() -> tuple[set[str], str]:
    asked = "--query-gpu=driver_version,name", "--format=csv,noheader"
    rows = [line.partition(", ") for line in nvidia_smi(*asked).splitlines()]
    return {name for _, _, name in rows}, rows[0][0] if rows else ""
