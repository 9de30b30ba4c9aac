"""GPUs that the NVIDIA driver lists, and why TensorFlow may not see them.

Nothing here needs TensorFlow, so `keras-conflux run` is quick.
"""

import os
import subprocess
from collections.abc import Mapping
from importlib import metadata


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs of CUDA_VISIBLE_DEVICES, else all numbers."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return _all_gpus()
    names = [name.strip() for name in given.split(",")]
    # CUDA ignores all names from the first invalid one on.
    valid = [bool(name) and not name.startswith("-") for name in names]
    return names[: valid.index(False)] if False in valid else names


def _all_gpus() -> list[str]:
    listed = nvidia_smi("-L").splitlines()
    lines = [line for line in listed if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]


def nvidia_smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi, `""` without a driver."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def unseen(listed: int, seen: int) -> str:
    """Describes the GPUs that TensorFlow does not see; `""` if it sees all."""
    if listed <= seen:
        return ""
    chosen = "CUDA_VISIBLE_DEVICES" in os.environ
    who = "CUDA_VISIBLE_DEVICES names" if chosen else "the driver lists"
    return f"{who} {listed} GPUs, and TensorFlow sees {seen}"


def cure(for_cuda: bool) -> str:
    """Returns the command to type where TensorFlow does not see GPUs."""
    there = _all_gpus()
    named = [name for name in visible_gpus(os.environ) if name.isdigit()]
    if set(named) - set(there):
        return f"nvidia-smi -L, which lists all {len(there)} GPUs"
    if not for_cuda:
        return "pip install 'tensorflow[and-cuda]'; this one has no CUDA"
    installed = {each.name for each in metadata.distributions()}
    if not any(name.startswith("nvidia-cudnn") for name in installed):
        return "pip install 'tensorflow[and-cuda]'; cuDNN is not installed"
    return (
        "`python -c 'import tensorflow as tf; "
        'tf.config.list_logical_devices("GPU")\'`, which prints the missing '
        "libraries; often the driver is older than TensorFlow's CUDA"
    )
