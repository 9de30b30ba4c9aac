"""Times random layers for images on the CPU and in a step, and prints JSON.

    python -m examples.benchmarks.augmentation [LAYER ...] [--batch 64]

For each layer: milliseconds a batch in a pipeline on the CPU, for a call
outside of `fit`, and in a step of `fit`, beyond a step without the layer; and
whether XLA compiles it. `Rotation` is that of `examples/augmentation.py`.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_conflux as kc
from examples.augmentation import Rotation
from examples.benchmarks import measured
from examples.benchmarks.epoch_clock import EpochClock

_SIZE = 224
LAYERS: dict[str, Callable[[], Any]] = {
    "RandomFlip": lambda: layers.RandomFlip("horizontal"),
    "RandomRotation": lambda: layers.RandomRotation(0.1),
    "Rotation": lambda: Rotation(0.1),
    "RandomZoom": lambda: layers.RandomZoom(0.1),
    "RandomTranslation": lambda: layers.RandomTranslation(0.1, 0.1),
    "RandomContrast": lambda: layers.RandomContrast(0.1),
    "RandomBrightness": lambda: layers.RandomBrightness(0.1),
}


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints a line for each layer."""
    name = "python -m examples.benchmarks.augmentation"
    parser = argparse.ArgumentParser(name)
    parser.add_argument("layers", nargs="*", metavar="LAYER")
    measured.add_sizes(parser)
    parser.set_defaults(batch=64, steps=32, epochs=2)
    options = parser.parse_args(arguments)
    kc.devices(1)
    rng = np.random.default_rng(0)
    shape = options.batch, _SIZE, _SIZE, 3
    images = rng.integers(0, 256, shape, dtype="uint8")
    without, _ = _in_step(None, images, options)
    for each in options.layers or LAYERS:
        make = LAYERS[each]
        step, is_compiled = _in_step(make(), images, options)
        found = {
            "layer": each,
            "batch": options.batch,
            "pipeline_ms": _in_pipeline(make(), images, options.steps),
            "call_ms": _called(make(), images, options.steps),
            "step_ms": round(step - without, 2),
            "step_without_ms": round(without, 2),
            "compiled": is_compiled,
        }
        print(json.dumps(found), flush=True)


def _in_pipeline(layer: Any, images: np.ndarray, steps: int) -> float:
    with tf.device("CPU:0"):
        data = tf.data.Dataset.from_tensors(images).repeat()
        data = data.map(
            lambda batch: layer(batch, training=True),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        drawn = iter(data.prefetch(tf.data.AUTOTUNE))
        return _milliseconds(lambda: next(drawn), steps)


def _called(layer: Any, images: np.ndarray, steps: int) -> float:
    batch = tf.cast(images, tf.float32)
    return _milliseconds(lambda: layer(batch, training=True), steps)


def _milliseconds(call: Callable[[], tf.Tensor], steps: int) -> float:
    """Returns the mean time of calls, after some that do not count."""
    for _ in range(4):
        call().numpy()
    began = time.perf_counter()
    for _ in range(steps):
        last = call()
    last[0, 0, 0, 0].numpy()  # waits
    return round((time.perf_counter() - began) / steps * 1e3, 2)


def _in_step(
    layer: Any, images: np.ndarray, options: argparse.Namespace
) -> tuple[float, bool]:
    """Returns the time of a step, and whether XLA compiles it."""
    model = keras.Sequential(
        [
            keras.Input(images.shape[1:], dtype="uint8"),
            *([layer] if layer else []),
            layers.Rescaling(1 / 255),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    kc.replicate(model, 1)
    with tf.device("CPU:0"):
        batch = images, np.zeros((len(images), 1), "float32")
        data = tf.data.Dataset.from_tensors(batch).repeat(options.steps)
    clock = EpochClock()
    model.fit(
        data,
        epochs=options.epochs + 2,
        verbose=0,  # pyright: ignore[reportArgumentType]
        callbacks=[clock],
        shuffle=False,
    )
    fastest = min(clock.clock.seconds[2:])
    return fastest / options.steps * 1e3, bool(model.jit_compile)


if __name__ == "__main__":
    main()
