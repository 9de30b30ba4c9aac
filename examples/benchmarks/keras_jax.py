"""Times Keras on JAX in a process of its own and prints JSON.

    cd examples; KERAS_BACKEND=jax python -m benchmarks.keras_jax MODEL DEVICES

The model is the same Keras model, under `keras.distribution.DataParallel`.
This package needs TensorFlow, so it is not imported: this file is started as a
part of the package `benchmarks`.
"""

import argparse
import json
import sys
from typing import Any

import jax
import keras

from . import measured
from . import models
from .cases import CASES
from .epoch_clock import EpochClock


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.keras_jax")
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("devices", type=int)
    measured.add_options(parser)
    # JAX compiles each step, and runs one at a time.
    parser.set_defaults(how="jax", jit="auto", execution=1)
    return parser.parse_args(arguments)


class Repeated(keras.utils.PyDataset):
    """An epoch of one batch again and again."""

    def __init__(self, batch: Any, steps: int) -> None:
        super().__init__()
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        return self._batch


def measure(options: argparse.Namespace) -> dict:
    """Trains for two epochs that are not timed and some that are.

    JAX traces again in the second one.
    """
    jax.config.update("jax_num_cpu_devices", options.devices)
    names = keras.distribution.list_devices()
    if len(names) < options.devices:
        raise SystemExit(
            f"Expected {options.devices} devices. JAX has {len(names)}."
        )
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(
            devices=names[: options.devices], auto_shard_dataset=False
        )
    )
    case = CASES[options.model]
    keras.config.set_dtype_policy(case.dtype)
    keras.utils.set_random_seed(0)
    model = models.build(options.model)
    batch = case.data((options.batch or case.batch_size) * options.devices)
    clock = EpochClock()
    history = model.fit(
        Repeated(batch, options.steps),
        epochs=options.epochs + 2,
        verbose=0,  # pyright: ignore[reportArgumentType]
        callbacks=[clock],
    )
    devices = jax.local_devices()[: options.devices]
    known = [device.memory_stats() for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in known if each]
    versions = {"jax": jax.__version__, "keras": keras.__version__}
    losses = history.history["loss"]
    first = devices[0]
    gpu = first.device_kind if first.platform == "gpu" else None
    return measured.result(options, clock.clock, losses, peaks, gpu, versions)


if __name__ == "__main__":
    print(json.dumps(measure(parse(sys.argv[1:]))), flush=True)
