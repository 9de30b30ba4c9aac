"""Says before a measurement what it will do, and about how long it takes."""

import os
from collections.abc import Iterable
from collections.abc import Sequence

from examples.benchmarks.runs import Run
from keras_conflux._devices.driver import visible_gpus

_START_SECONDS = {"GPUs": 60.0, "CPU devices": 25.0}
"""About what a process takes before its first epoch. The tables of
docs/performance.md have 28 to 73 s."""
_STEP_SECONDS = 0.05
"""About what a step takes: 0.03 to 0.05 s on GPUs, less of `small`."""


def described(
    runs: Sequence[Run],
    steps: int,
    starts: int,
    gpus: Sequence[str],
    out: os.PathLike[str],
) -> str:
    """Returns what will run where, for how long, and what it writes.

    Args:
        runs: What will be measured.
        steps: How many a training takes.
        starts: How often each training is started.
        gpus: The GPUs that are dealt out, if any.
        out: The folder for what is measured.
    """
    seen = len(gpus or visible_gpus(os.environ))
    kind = "GPUs" if seen else "CPU devices"
    seconds = sum(
        _seconds(run, kind, steps, starts) / _at_once(run, gpus) for run in runs
    )
    where = f"{seen} GPUs" if seen else "CPU devices, as there is no GPU"
    lines = [
        f"{len(runs)} runs on {where}; {in_words(seconds)}; writes {out}/:",
        *(f"  {_name(run)} on {_count(run.devices)}" for run in runs),
    ]
    large = _models(runs) - {"small"}
    if not seen and large:
        lines.append(
            f"Models for GPUs take hours on CPUs: {', '.join(sorted(large))}."
        )
    return "\n".join(lines)


def in_words(seconds: float) -> str:
    """Returns about how long something takes."""
    if seconds < 90:
        return f"about {round(seconds)} s"
    if seconds < 5400:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours"


def _seconds(run: Run, kind: str, steps: int, starts: int) -> float:
    start = _START_SECONDS[kind]
    if not run.is_training:
        return start
    return (run.starts or starts) * start + steps * _STEP_SECONDS


def _at_once(run: Run, gpus: Sequence[str]) -> int:
    return max(1, len(gpus) // run.devices)


def _count(devices: int) -> str:
    return "one device" if devices == 1 else f"{devices} devices"


def _name(run: Run) -> str:
    if not run.is_training:
        return run.module
    said = ("--steps=", "--epochs=", "--batch", "--jit=auto", str(run.devices))
    words = [word for word in run.arguments if not word.startswith(said)]
    if run.module == "keras_jax":
        words.append("jax")
    return " ".join(word.removeprefix("--") for word in words)


def _models(runs: Iterable[Run]) -> set[str]:
    return {run.arguments[0] for run in runs if run.is_training}
