"""Times plain `model.fit` in a process of its own and prints JSON.

    python -m examples.benchmarks.train MODEL HOW DEVICES [options]

HOW is `keras`, plain Keras on one device; `stock`, Keras under TensorFlow's
own `MirroredStrategy`; or `conflux`, a model that was given to `replicate`.
DEVICES is how many each process has; `keras-conflux run --processes N -m`
starts several.
"""

import argparse
import functools
import json
import sys
from typing import Any

import keras
import tensorflow as tf

import keras_conflux as kc
from examples.benchmarks import breakdown
from examples.benchmarks import measured
from examples.benchmarks import models
from examples.benchmarks import report
from examples.benchmarks.cases import CASES
from examples.benchmarks.epoch_clock import EpochClock


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.train")
    parser.add_argument("model")
    parser.add_argument("how", choices=["keras", "stock", "conflux"])
    parser.add_argument("devices", type=int)
    measured.add_options(parser)
    parser.add_argument("--jit", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--execution", type=int, default=1)
    parser.add_argument(
        "--shard",
        choices=["none", "optimizer", "weights"],
        default="none",
        help="what each device keeps a part of, with conflux",
    )
    parser.add_argument(
        "--remat",
        action="store_true",
        help="compute the activations of each layer again, with conflux",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=1,
        help="in how many parts a device runs its part, with conflux",
    )
    parser.add_argument("--profile", help="a folder for a trace of 24 steps")
    parser.add_argument(
        "--breakdown", action="store_true", help="where a step's time goes"
    )
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> tuple[keras.Model, Any]:
    """Returns the compiled model and some global batches of data."""
    devices = kc.devices(options.devices)
    keras.config.set_dtype_policy(CASES[options.model].dtype)
    keras.utils.set_random_seed(0)
    shard = None if options.shard == "none" else options.shard
    strategy = tf.distribute.get_strategy()
    if options.how == "stock" and options.devices > 1:
        strategy = tf.distribute.MirroredStrategy(list(devices))
    elif options.how == "conflux" and shard:
        # A model that is larger than a device is made in parts.
        strategy = kc.replicate(devices=devices, shard=shard)
    remat = keras.RematScope("full" if options.remat else None)
    with strategy.scope(), remat:
        model = models.build(options.model)
    model.compile(
        model.optimizer,
        model.loss,
        jit_compile={"auto": "auto", "on": True, "off": False}[options.jit],
        steps_per_execution=options.execution,
    )
    if options.how == "conflux":
        kc.replicate(
            model, devices, shard=shard, microbatches=options.microbatches
        )
    return model, measured.batches(options, kc.process_count())


def measure(options: argparse.Namespace) -> dict:
    """Trains for one epoch that is not timed and some that are."""
    model, batches = prepare(options)
    dataset = _in_turn(batches).repeat().take(options.steps)
    clock = EpochClock()
    history = model.fit(
        dataset,
        epochs=options.epochs + 1,
        verbose=0,  # pyright: ignore[reportArgumentType]
        callbacks=[clock],
    )
    if options.profile:
        with tf.profiler.experimental.Profile(options.profile):
            model.fit(dataset.take(24), verbose=0)  # pyright: ignore[reportArgumentType]
    devices = kc.devices(options.devices)
    on_gpu = devices[0].kind == "GPU"
    peaks = [
        tf.config.experimental.get_memory_info(device)["peak"]
        for device in devices
        if on_gpu
    ]
    losses = history.history["loss"]
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    names = report.gpus()
    result = measured.result(
        *(options, clock.clock, losses, peaks),
        names[0] if names else None,
        versions,
        kc.process_count(),
    )
    if options.shard != "none":
        result["how"] += f"-{options.shard}"
    if options.remat:
        result["how"] += "-remat"
    if options.microbatches > 1:
        result["how"] += f"-{options.microbatches}-microbatches"
    result["variable_bytes"] = _bytes_on_devices(model)
    if options.breakdown and options.how == "conflux":
        result["breakdown"] = breakdown.of_program(model, batches[0])
    return result


def _in_turn(batches: list[Any]) -> tf.data.Dataset:
    """Returns a dataset of batches, which are not copied when drawn."""
    with tf.device("CPU:0"):
        each = [tf.data.Dataset.from_tensors(batch) for batch in batches]
    return functools.reduce(tf.data.Dataset.concatenate, each)


def _bytes_on_devices(model: keras.Model) -> list[int]:
    """Returns how many bytes of variables each device holds."""
    found: dict[str, int] = {}
    for variable in [*model.variables, *model.optimizer.variables]:
        value: Any = variable.value
        strategy = getattr(value, "distribute_strategy", None)
        copies = [value]
        if strategy is not None:
            copies = strategy.experimental_local_results(value)
        for copy in copies:
            size = copy.shape.num_elements() * copy.dtype.size
            found[copy.device] = found.get(copy.device, 0) + size
    return [*found.values()]


def main() -> None:
    """Prints one line of JSON, for all processes if there are several."""
    options = parse(sys.argv[1:])
    kc.initialize()
    result = measure(options)
    if kc.process_index() == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
