"""Which GPUs there are, and which process gets which."""

import subprocess
from collections.abc import Mapping
from collections.abc import Sequence


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs, as CUDA_VISIBLE_DEVICES has them.

    No GPU is initialized.

    Args:
        environ: The environment variables.

    Returns:
        The GPUs of CUDA_VISIBLE_DEVICES if that is set, and else the numbers
        of all that nvidia-smi lists.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return _all_gpus()
    names = [name.strip() for name in given.split(",")]
    # CUDA ignores all names from the first invalid one on.
    valid = [bool(name) and not name.startswith("-") for name in names]
    return names[: valid.index(False)] if False in valid else names


def deal(
    gpus: Sequence[str], processes: int, per_process: int | None
) -> list[str | None]:
    """Deals GPUs out to processes.

    Args:
        gpus: The names of the GPUs.
        processes: The number of processes.
        per_process: How many each gets; `None` for as many as possible.

    Returns:
        What each process gets as CUDA_VISIBLE_DEVICES, or `None` to leave it
        as it is, where there are no GPUs.

    Raises:
        ValueError: If there are not enough.
    """
    if per_process is None:
        if not gpus:
            return [None] * processes
        per_process = len(gpus) // processes
        if per_process == 0:
            raise ValueError(
                f"there are {len(gpus)} GPUs for {processes} processes, which "
                "cannot share one: type --processes "
                f"{len(gpus)}, or --gpus-per-process 0 to run on CPUs"
            )
    if per_process == 0:
        return ["-1"] * processes
    if per_process * processes > len(gpus):
        raise ValueError(
            f"{processes} processes with {per_process} GPUs each need "
            f"{per_process * processes} GPUs, but there are {len(gpus)}"
        )
    starts = range(0, per_process * processes, per_process)
    return [",".join(gpus[start : start + per_process]) for start in starts]


def _all_gpus() -> list[str]:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]
