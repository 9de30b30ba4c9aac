"""Which process gets which GPUs."""

from collections.abc import Sequence


def deal(
    gpus: Sequence[str], processes: int, per_process: int | None
) -> list[str | None]:
    """Deals GPUs out to processes.

    Args:
        gpus: The names of the GPUs.
        processes: The number of processes.
        per_process: The number for each; `None` for as many as possible.

    Returns:
        The CUDA_VISIBLE_DEVICES of each process, or `None` to leave it
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
