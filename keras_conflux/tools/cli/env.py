"""`keras-conflux env` prints facts about a machine, for an issue."""

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
"""Beginnings of variables whose values are shown. `TF_` is none of them, as
other programs use it as well, also for secrets."""


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line.

    Args:
        subcommands: The result of `ArgumentParser.add_subparsers`.
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
    """Prints the facts.

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
    for name, value in rows(found).items():
        table.add_row(name, value)
    # Lines that a terminal breaks would not be a table any more.
    Console(width=10_000, highlight=False, markup=False).print(table)
    return 0


def facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the facts for an issue, for programs.

    All keys are always there, `None` for unknown facts. Memory is in MiB.

    Args:
        environ: The environment variables.
    """
    processes = nvidia.processes()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "packages": _versions(),
        "gpus": _gpus(),
        "gpu_links": nvidia.topology() or None,
        "gpu_processes": [
            {"pid": int(pid), "gpu": gpu} for gpu, pid, _ in processes
        ],
        **_tensorflow(),
        "settings": _settings(environ),
        "cluster_variables": _of_launchers(environ),
        "initialize": _announced(environ),
    }


def rows(found: dict[str, Any]) -> dict[str, str]:
    """Returns the rows of the table for people.

    Args:
        found: The result of `facts`.
    """
    return {
        "Python": found["python"],
        "system": found["system"],
        "CPU cores": str(found["cpu_cores"]),
        **found["packages"],
        **_gpu_rows(found),
        **_tensorflow_rows(found),
        "settings": ", ".join(
            f"{name}={value}" for name, value in found["settings"].items()
        )
        or "none",
        "cluster variables": ", ".join(found["cluster_variables"]) or "none",
        "kc.initialize() would": _would_initialize(found["initialize"]),
    }


def _announced(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the launchers' announcements. Nothing connects."""
    told = []
    for launcher in LAUNCHERS:
        try:
            found = launcher.announced(environ)
        except ClusterError:  # whose text may name hosts
            return {"told": [], "wrong": launcher.name}
        if found is not None:
            told.append({"processes": found.count, "by": found.count_from})
    return {"told": told, "wrong": None}


def _would_initialize(announced: dict[str, Any]) -> str:
    if announced["wrong"] is not None:
        return f"raise a ClusterError about {announced['wrong']}"
    if not announced["told"]:
        return "do nothing: this process is alone"
    told = [
        f"{each['processes']} processes ({each['by']})"
        for each in announced["told"]
    ]
    return f"join {'; also told: '.join(told)}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> list[dict[str, Any]]:
    fields = "index", "name", "memory.total", "memory.used", "driver_version"
    return [
        {
            "index": _number(index),
            "name": name,
            "memory": _number(total),
            "memory_used": _number(used),
            "driver": driver,
        }
        for index, name, total, used, driver in nvidia.gpus(*fields)
    ]


def _number(text: str) -> int | None:
    """Returns the number of `"4 MiB"`, `None` where the driver tells none."""
    digits = text.partition(" ")[0]
    return int(digits) if digits.isdigit() else None


def _gpu_rows(found: dict[str, Any]) -> dict[str, str]:
    if not found["gpus"]:
        return {"GPUs": "none that nvidia-smi lists"}
    rows = {
        f"GPU {each['index']}": f"{each['name']}, {each['memory']} MiB, "
        f"{each['memory_used']} MiB in use, driver {each['driver']}"
        for each in found["gpus"]
    }
    busy = [
        f"{each['pid']} on {each['gpu']}" for each in found["gpu_processes"]
    ]
    if busy:
        rows["processes on GPUs"] = ", ".join(busy)
    if found["gpu_links"]:
        rows["between GPUs"] = found["gpu_links"]
    return rows


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


def _tensorflow_rows(found: dict[str, Any]) -> dict[str, str]:
    if found["import_error"] is not None:
        name, _, why = found["import_error"].partition(": ")
        return {name: f"cannot be imported: {why}"}
    cuda, cudnn = found["cuda"], found["cudnn"]
    return {
        "TensorFlow is built for": (
            f"CUDA {cuda}, cuDNN {cudnn}" if cuda else "CPUs"
        ),
        "TensorFlow sees": ", ".join(found["devices"]),
        "compiled programs on disk": found["program_cache"],
    }


def _run_the_package() -> None:
    """Imports the package as `import keras_conflux` does, if not yet done."""
    package = sys.modules["keras_conflux"]
    if not hasattr(package, "__all__"):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(_SETTINGS) and name != roll_call.TOKEN
    }


def _of_launchers(environ: Mapping[str, str]) -> list[str]:
    """Returns names of variables only: values name hosts, or are secret."""
    told = {name for each in LAUNCHERS for name in each.variables_in(environ)}
    return sorted(told | {roll_call.TOKEN} & environ.keys())
