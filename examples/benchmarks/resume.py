"""Measures what `keras_conflux.Resume` costs, and prints JSON.

    python -m examples.benchmarks.resume [--devices 1] [--layers 5]

A layer and its optimizer have 0.2 GB of state, so 5 of them make 1 GB.
"""

import argparse
import json
import tempfile
import time
from typing import Any

import keras
import numpy as np

import keras_conflux as kc
from examples.benchmarks.epoch_clock import EpochClock

_WIDTH = 4096
_SAVES = 5
_SILENT: dict[str, Any] = {"verbose": 0}


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.resume")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=5, help="of 0.2 GB")
    parser.add_argument("--directory", help="where checkpoints are written")
    parser.add_argument("--steps", type=int, default=300, help="per epoch")
    parser.add_argument("--epochs", type=int, default=6, help="per round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    devices = kc.devices(options.devices)
    found = {"devices": list(map(str, devices))}
    found |= saves(devices, options)
    found |= undisturbed(devices, options)
    print(json.dumps(found, indent=1))


def saves(devices: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measures for how long a checkpoint holds training up.

    Each begins when the one before has been written.
    """
    model = _model(devices, options.layers, _WIDTH)
    x = np.zeros([4 * len(devices), _WIDTH], "float32")
    held_up = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for epochs in range(1, _SAVES + 1):  # one more, and a checkpoint
            resume = kc.Resume(folder, keep=1)
            model.fit(
                *(x, x, len(devices), epochs), callbacks=[resume], **_SILENT
            )
            held_up += resume.pauses
        size = kc.checkpoints(folder)[0].size
        began = time.monotonic()
        kc.save(model, folder, step=10**6)
        seconds = time.monotonic() - began
    return {
        "checkpoint_gb": size / 1e9,
        "held_up_s": held_up,
        "copied_and_written_s": seconds,
    }


def undisturbed(devices: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measures epochs with and without `Resume` in turn, and takes the fastest.

    What else runs on a machine only ever makes an epoch slower.
    """
    model = _model(devices, 2, 256)
    x = np.zeros([64 * options.steps, 256], "float32")
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(options.rounds):
        for name, taken in times.items():
            with tempfile.TemporaryDirectory() as folder:
                clock = EpochClock()
                resume = [kc.Resume(folder)] if name == "with" else []
                model.fit(
                    *(x, x, 64, options.epochs),
                    callbacks=[clock, *resume],
                    **_SILENT,
                )
                taken += clock.clock.seconds[
                    1:-1
                ]  # without tracing and the end
    step = {
        name: 1e3 * min(taken) / options.steps for name, taken in times.items()
    }
    return {"step_ms": step, "ratio": step["with"] / step["without"]}


def _model(devices: Any, layers: int, width: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *dense])
    kc.replicate(model, devices)
    model.compile("adam", "mse")
    return model


if __name__ == "__main__":
    main()
