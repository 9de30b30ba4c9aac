"""What is reported of a run: its times, speed and memory.

All that is measured imports this file, also what has no Keras.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import numpy as np

from .cases import CASES

_imported = time.time()


class Clock:
    """Takes the time of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ends: list[float] = []
        """When each epoch ended, in seconds since 1970."""

    def start(self) -> None:
        """An epoch begins."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """It ends."""
        self.seconds.append(time.perf_counter() - self._began)
        self.ends.append(time.time())


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds how much is trained."""
    parser.add_argument("--batch", type=int, help="samples per device")
    parser.add_argument("--steps", type=int, default=64, help="per epoch")
    parser.add_argument("--epochs", type=int, default=4, help="that are timed")
    parser.add_argument(
        "--batches",
        type=int,
        default=16,
        help="how many different ones are drawn, which are trained on in turn",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what all that is measured can be told."""
    add_sizes(parser)
    parser.add_argument(
        "--began",
        type=float,
        default=_imported,
        help="when the process was started, in seconds since 1970",
    )


def add_tuning(
    parser: argparse.ArgumentParser, words: Mapping[str, str]
) -> None:
    """Adds what a peer can be told besides.

    Args:
        parser: Of its command line.
        words: What each word means.
    """
    meanings = "; ".join(f"{word}: {words[word]}" for word in words)
    parser.add_argument(
        "--tuning", nargs="*", default=[], choices=[*words], help=meanings
    )


def batches(
    options: argparse.Namespace, processes: int = 1
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns different global batches.

    Args:
        options: The command line of the run.
        processes: How many processes train together.
    """
    case = CASES[options.model]
    size = (options.batch or case.batch_size) * options.devices * processes
    inputs, labels = case.data(size * options.batches)
    rows = [slice(i * size, (i + 1) * size) for i in range(options.batches)]
    return [(inputs[each], labels[each]) for each in rows]


def add_start(line: dict, other: dict) -> None:
    """Adds what one more process has reported to what the first has.

    Args:
        line: Of the first process.
        other: Of a process that found what the first has cached.
    """
    line["ms_a_step"] += other["ms_a_step"]
    later = [*line.get("later_starts_s", []), other["start_s"]]
    line["later_starts_s"] = later
    line["second_start_s"] = round(statistics.median(later), 2)


def result(
    options: argparse.Namespace,
    clock: Clock,
    losses: list[float],
    peak_bytes: list[int],
    gpu: str | None,
    versions: dict[str, str],
    processes: int = 1,
) -> dict:
    """Returns what one run reports.

    Args:
        options: The command line of the run.
        clock: Of its epochs. All but the last `options.epochs` are not timed.
        losses: Of its epochs.
        peak_bytes: Per device of this process; empty where it is not known.
        gpu: What its GPUs are called, if it has any.
        versions: Of the packages that have trained.
        processes: How many processes have trained together.
    """
    untimed = len(clock.seconds) - options.epochs
    timed = clock.seconds[untimed:]
    usual = untimed * statistics.median(timed)
    case = CASES[options.model]
    batch = options.batch or case.batch_size
    return {
        "model": options.model,
        "how": options.how,
        "tuning": " ".join(getattr(options, "tuning", [])),
        "devices": options.devices,
        "processes": processes,
        "batch": batch,
        "jit": options.jit,
        "execution": options.execution,
        "start_s": round(clock.ends[untimed - 1] - options.began - usual, 2),
        "first_epoch_s": round(clock.seconds[0], 2),
        "ms_a_step": [round(s / options.steps * 1e3, 3) for s in timed],
        "unit": case.unit,
        "units_a_step": batch * options.devices * processes * case.units,
        "peak_bytes": peak_bytes,
        "loss": [float(loss) for loss in losses],
        "gpu": gpu,
        "versions": versions,
    }
