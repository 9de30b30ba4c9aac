"""The clock of a run of `fit`, and what is reported of the run.

Peers that cannot import this package import this file, so it needs Keras only.
"""

import argparse
import time

import keras

from .models import CASES


class Clock(keras.callbacks.Callback):
    """Takes the time of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Stops it."""
        self.seconds.append(time.perf_counter() - self._began)


def result(
    options: argparse.Namespace,
    clock: Clock,
    losses: list[float],
    peak_bytes: list[int],
    processes: int = 1,
) -> dict:
    """Returns what one run reports.

    Args:
        options: The command line of the run.
        clock: Of its epochs, of which the first is not timed.
        losses: Of its epochs.
        peak_bytes: Per device of this process; empty where it is not known.
        processes: How many processes have trained together.
    """
    first, *timed = clock.seconds
    case = CASES[options.model]
    batch = options.batch or case.batch_size
    return {
        "model": options.model,
        "how": options.how,
        "devices": options.devices,
        "processes": processes,
        "batch": batch,
        "jit": options.jit,
        "execution": options.execution,
        "first_epoch_s": round(first, 2),
        "ms_a_step": [round(s / options.steps * 1e3, 3) for s in timed],
        "unit": case.unit,
        "units_a_step": batch * options.devices * processes * case.units,
        "peak_bytes": peak_bytes,
        "loss": [float(loss) for loss in losses],
    }
