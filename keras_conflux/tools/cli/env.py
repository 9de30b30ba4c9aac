"""`conflux env` prints what an issue should say about a machine."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from keras_conflux._cluster import roll_call
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers.order import LAUNCHERS
from keras_conflux.tools.checks import nvidia
from keras_conflux.tools.cli.options import add_json

_PACKAGES = (
    "keras-conflux",
    "keras",
    "tensorflow",
    "tensorflow-cpu",
    "numpy",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu12",
)
_SETTINGS = (
    "CONFLUX_",
    "CUDA_",
    "KERAS_BACKEND",
    "KERAS_CONFLUX_",
    "NCCL_",
    "TF_CPP_",
    "TF_CUDNN_",
    "TF_DETERMINISTIC_",
    "TF_ENABLE_",
    "TF_FORCE_",
    "TF_GPU_",
    "TF_NUM_",
    "TF_XLA_",
    "XLA_",
)
"""Beginnings of variables whose values are shown. Not those of `TF_`, which
other programs use as well, also for secrets."""


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line.

    Args:
        subcommands: What `ArgumentParser.add_subparsers` returned.
    """
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
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Prints what is found.

    Args:
        options: The command line.

    Returns:
        The exit status, 0.
    """
    found = facts(os.environ)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    table = Table("what", "here", box=MARKDOWN)
    for name, value in found.items():
        table.add_row(name, value)
    # Lines that a terminal breaks would not be a table any more.
    Console(width=10_000, highlight=False, markup=False).print(table)
    return 0


def facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what an issue should say, by what it is.

    Args:
        environ: The environment variables.
    """
    return {
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU cores": str(os.cpu_count()),
        **_versions(),
        **_gpus(),
        **_tensorflow(),
        "settings": _settings(environ),
        "cluster variables": ", ".join(_of_launchers(environ)) or "none",
        "kc.initialize() would": would_initialize(environ),
    }


def would_initialize(environ: Mapping[str, str]) -> str:
    """Returns what `kc.initialize()` would do. Nothing connects."""
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
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> dict[str, str]:
    fields = "index", "name", "memory.total", "memory.used", "driver_version"
    rows = nvidia.gpus(*fields)
    found = {
        f"GPU {index}": f"{name}, {total}, {used} in use, driver {driver}"
        for index, name, total, used, driver in rows
    }
    if not found:
        return {"GPUs": "none that nvidia-smi lists"}
    busy = [f"{pid} on {gpu}" for gpu, pid, _ in nvidia.processes()]
    if busy:
        found["processes on GPUs"] = ", ".join(busy)
    if len(found) > 1:
        found["between GPUs"] = nvidia.topology()
    return found


def _tensorflow() -> dict[str, str]:
    """Returns what TensorFlow sees. It does not start."""
    try:
        import tensorflow as tf
    except ImportError as error:
        return {"TensorFlow": f"cannot be imported: {error}"}
    try:
        _run_the_package()
    except ImportError as error:
        return {"keras_conflux": f"cannot be imported: {error}"}
    from keras_conflux._extensions.program_cache import setup

    kept = setup.describe()
    built = tf.sysconfig.get_build_info()
    devices = tf.config.list_physical_devices()
    cuda, cudnn = built.get("cuda_version"), built.get("cudnn_version")
    return {
        "TensorFlow is built for": (
            f"CUDA {cuda}, cuDNN {cudnn}" if cuda else "CPUs"
        ),
        "TensorFlow sees": ", ".join(
            each.name.removeprefix("/physical_device:") for each in devices
        ),
        "compiled programs on disk": kept,
    }


def _run_the_package() -> None:
    """Does what `import keras_conflux` does, if the command has not."""
    package = sys.modules["keras_conflux"]
    if not hasattr(package, "__all__"):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


def _settings(environ: Mapping[str, str]) -> str:
    names = sorted(
        each
        for each in environ
        if each.startswith(_SETTINGS) and each != roll_call.TOKEN
    )
    return ", ".join(f"{name}={environ[name]}" for name in names) or "none"


def _of_launchers(environ: Mapping[str, str]) -> list[str]:
    """Returns names of variables only: values name hosts, or are secret."""
    told = {name for each in LAUNCHERS for name in each.variables_in(environ)}
    return sorted(told | {roll_call.TOKEN} & environ.keys())
