"""`keras-conflux env` prints facts about a machine, for an issue."""

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from keras_conflux._cluster import roll_call
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers.known import LAUNCHERS
from keras_conflux.tools import add_json
from keras_conflux.tools.checks import nvidia

_PACKAGES = (
    *("keras-conflux", "keras", "tensorflow", "tensorflow-cpu", "numpy"),
    *("nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"),
)
_SETTINGS = (
    *("CONFLUX_", "CUDA_", "KERAS_BACKEND", "KERAS_CONFLUX_", "NCCL_"),
    *("TF_CPP_", "TF_CUDNN_", "TF_DETERMINISTIC_", "TF_ENABLE_"),
    *("TF_FORCE_", "TF_GPU_", "TF_NUM_", "TF_XLA_", "XLA_"),
)
"""Beginnings of variables whose values are shown. `TF_` is none of them, as
other programs use it as well, also for secrets."""


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line."""
    parser = subcommands.add_parser(
        "env",
        help="print versions, devices and settings, for an issue",
        description=(
            "Prints a table for an issue: versions, devices, settings. No "
            "GPU is initialized, and none of its memory is taken."
        ),
        allow_abbrev=False,
    )
    add_json(parser)
    parser.set_defaults(main=main, error=parser.error)


def main(options: argparse.Namespace) -> int:
    """Prints the facts, and returns the exit status, 0."""
    found = facts(os.environ)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print("| fact | here |\n|---|---|")
    for name, value in found.items():
        print(f"| {name.replace('_', ' ')} | {shown(value)} |")
    return 0


def shown(value: Any) -> str:
    """Returns text, a number, or dicts and lists of these as people read it."""
    if isinstance(value, dict):
        pairs = (f"{name}={shown(each)}" for name, each in value.items())
        return ", ".join(pairs) or "none"
    if isinstance(value, list):
        return "; ".join(map(shown, value)) or "none"
    return "none" if value is None else str(value)


def facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the facts for an issue, `None` for unknown ones."""
    fields = "index", "name", "memory.total", "memory.used", "driver_version"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "packages": _versions(),
        "gpus": [
            dict(zip(fields, gpu, strict=True)) for gpu in nvidia.gpus(*fields)
        ],
        "gpu_links": nvidia.topology() or None,
        "gpu_processes": [
            {"pid": int(pid), "gpu": gpu} for gpu, pid, _ in nvidia.processes()
        ],
        **_tensorflow(),
        "settings": {
            name: environ[name]
            for name in sorted(environ)
            if name.startswith(_SETTINGS) and name != roll_call.TOKEN
        },
        "cluster_variables": _of_launchers(environ),
        "initialize": _would_initialize(environ),
    }


def _would_initialize(environ: Mapping[str, str]) -> str:
    """Says what `kc.initialize()` would do. Nothing connects."""
    told = []
    for launcher in LAUNCHERS:
        try:
            found = launcher.announced(environ)
        except ClusterError:  # whose text may name hosts
            return f"raise a ClusterError about {launcher.name}"
        if found is not None:
            told.append(f"{found.count} processes ({found.count_from})")
    if not told:
        return "do nothing: this process is alone"
    return f"join {'; also told: '.join(told)}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _tensorflow() -> dict[str, Any]:
    """Returns the facts about TensorFlow. It does not start."""
    found: dict[str, Any] = dict.fromkeys(
        ("import_error", "cuda", "cudnn", "devices", "program_cache")
    )
    try:
        import tensorflow as tf
    except ImportError as error:
        return found | {"import_error": f"tensorflow: {error}"}
    try:
        _run_the_package()
    except ImportError as error:
        return found | {"import_error": f"keras_conflux: {error}"}
    from keras_conflux._extensions.program_cache import setup

    built = tf.sysconfig.get_build_info()
    return {
        "import_error": None,
        "cuda": built.get("cuda_version"),
        "cudnn": built.get("cudnn_version"),
        "devices": [
            each.name.removeprefix("/physical_device:")
            for each in tf.config.list_physical_devices()
        ],
        "program_cache": setup.describe(),
    }


def _run_the_package() -> None:
    """Imports the package as `import keras_conflux` does, if not yet done."""
    package = sys.modules["keras_conflux"]
    if not hasattr(package, "__all__"):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


def _of_launchers(environ: Mapping[str, str]) -> list[str]:
    """Returns names of variables only: values name hosts, or are secret."""
    told = {name for each in LAUNCHERS for name in each.variables_in(environ)}
    return sorted(told | {roll_call.TOKEN} & environ.keys())
