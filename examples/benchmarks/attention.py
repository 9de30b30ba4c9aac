"""Times fused attention and Keras' own on long sequences, and prints JSON.

    python -m examples.benchmarks.attention 2048 [--batch 8] [--layers 2]

Each trains a GPT on one GPU in a process of its own, whose peak memory is that
of this attention alone. What runs out of memory says so.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from examples.benchmarks import measured

_WAYS = ("fused", "keras")
_VOCABULARY = 32_000


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.attention")
    parser.add_argument("length", type=int, help="tokens per sequence")
    parser.add_argument("--layers", type=int, default=2)
    measured.add_sizes(parser)
    parser.set_defaults(batch=8, steps=32, epochs=3)
    parser.add_argument("--way", choices=_WAYS, help="this one, and here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures both, or the one that is asked for."""
    options = parse(arguments)
    if options.way:
        print(json.dumps(measure(options)), flush=True)
        return
    given = sys.argv[1:] if arguments is None else arguments
    module = [sys.executable, "-m", "examples.benchmarks.attention"]
    for way in _WAYS:
        subprocess.run([*module, *given, "--way", way], check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Trains for one epoch that is not timed and some that are."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_conflux as kc
    from examples.benchmarks import models
    from examples.benchmarks.epoch_clock import EpochClock

    if options.way == "keras":
        keras.config.disable_flash_attention()
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    devices = kc.devices(1)
    model = models.gpt(
        depth=options.layers, length=options.length, vocabulary=_VOCABULARY
    )
    kc.replicate(model, devices)
    rng = np.random.default_rng(0)
    shape = options.batch, options.length + 1
    tokens = rng.integers(0, _VOCABULARY, shape, dtype="int32")
    data = tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:]))
    found: dict[str, Any] = {
        "length": options.length,
        "batch": options.batch,
        "layers": options.layers,
        "attention": options.way,
    }
    clock = EpochClock()
    try:
        losses = model.fit(
            data.repeat(options.steps),
            epochs=options.epochs + 1,
            verbose=0,  # pyright: ignore[reportArgumentType]
            callbacks=[clock],
        ).history["loss"]
    except tf.errors.ResourceExhaustedError as error:
        return found | {"error": str(error)[:300]}
    times = [1e3 * each / options.steps for each in clock.clock.seconds[1:]]
    found |= {"step_ms": times, "losses": losses}
    if devices[0].kind == "GPU":
        memory = tf.config.experimental.get_memory_info(devices[0])
        found["peak_gb"] = memory["peak"] / 1e9
    return found


if __name__ == "__main__":
    main()
