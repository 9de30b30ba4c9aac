"""Measures `fit` with a real input pipeline, and prints JSON.

    python -m examples.benchmarks.pipeline SOURCE [options]

SOURCE is where each batch comes from: `synthetic`, one batch again and again;
`memory`, decoded images in memory, which are cropped and flipped; or `files`,
JPEG files, which are read, decoded, cropped, scaled and flipped. The files are
made first, in a temporary folder.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_conflux as kc
from examples.benchmarks import measured
from examples.benchmarks import models
from examples.benchmarks.cases import CASES

_HEIGHT, _WIDTH = 375, 500  # of a file; the usual size in ImageNet
_STORED = 256  # height and width of what is in memory
_CLASSES = 10
_PATCHES = 24  # of the colours that an image is made of, on a side
_BOX = [[[0.0, 0.0, 1.0, 1.0]]]  # the whole image


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints one line of JSON."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.pipeline")
    parser.add_argument("source", choices=list(SOURCES))
    parser.add_argument(
        "--model", choices=["resnet", "small"], default="resnet"
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--images", type=int, default=4096, help="to draw from")
    measured.add_sizes(parser)
    parser.set_defaults(epochs=3)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(parser.parse_args(arguments), Path(folder))
    print(json.dumps(found), flush=True)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains on images of a source, and draws as many without training.

    Args:
        options: The command line.
        folder: Where files are written.

    Returns:
        What was measured. `alone_images_s` is how fast the input is without
        training, `input_wait` the share of each epoch that `fit` waits for it,
        and `said` whether `fit` has said so in the log.
    """
    devices = kc.devices(options.devices)
    case = CASES[options.model]
    keras.config.set_dtype_policy(case.dtype)
    keras.utils.set_random_seed(0)
    batch = (options.batch or case.batch_size) * options.devices
    model = kc.replicate(models.build(options.model), devices)
    size = model.input_shape[1]
    data = SOURCES[options.source](options.images, batch, size, folder)
    data = data.prefetch(tf.data.AUTOTUNE)
    said = _Said()
    logging.getLogger("keras_conflux").addHandler(said)
    history = model.fit(
        data,
        steps_per_epoch=options.steps,
        epochs=options.epochs + 1,
        verbose=0,  # pyright: ignore[reportArgumentType]
        shuffle=False,  # the dataset does
        callbacks=[kc.Throughput()],
    ).history
    rounded = {
        key: [round(value, 3) for value in history[key][1:]]
        for key in ("samples_per_second", "step_ms", "input_wait")
    }
    return {
        "source": options.source,
        "model": options.model,
        "devices": options.devices,
        "batch": batch // options.devices,
        "cpus": len(os.sched_getaffinity(0)),
        "alone_images_s": round(
            batch * _batches_per_second(data, options.steps), 1
        ),
        **rounded,
        "said": said.texts,
    }


class _Said(logging.Handler):
    """Keeps what the log says of slow data."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "waited for its data" in text:
            self.texts.append(text)


def _batches_per_second(data: tf.data.Dataset, steps: int) -> float:
    """Returns how many are drawn while nothing is trained.

    The first ones, which find the best number of threads, do not count.
    """
    batches = iter(data)
    for _ in range(steps):
        next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return steps / (time.perf_counter() - began)


def _synthetic(
    count: int, batch: int, size: int, folder: Path
) -> tf.data.Dataset:
    del count, folder
    images = np.random.default_rng(0).integers(
        0, 256, (batch, size, size, 3), dtype="uint8"
    )
    labels = np.arange(batch, dtype="int32") % _CLASSES
    return tf.data.Dataset.from_tensors((images, labels)).repeat()


def _in_memory(
    count: int, batch: int, size: int, folder: Path
) -> tf.data.Dataset:
    del folder
    side = max(_STORED, size)
    drawn = np.stack([_drawn(i, side, side) for i in range(count)])
    with tf.device("CPU:0"):
        images = tf.constant(drawn)

    def cropped(index: tf.Tensor) -> tf.Tensor:
        return tf.image.random_crop(images[index], [size, size, 3])

    return _batches(count, batch, cropped)


def _from_files(
    count: int, batch: int, size: int, folder: Path
) -> tf.data.Dataset:
    for index in range(count):
        image = tf.io.encode_jpeg(_drawn(index, _HEIGHT, _WIDTH), quality=90)
        tf.io.write_file(str(folder / f"{index}.jpg"), image)

    def decoded(index: tf.Tensor) -> tf.Tensor:
        name = tf.strings.format(f"{folder}/{{}}.jpg", index)
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            [_HEIGHT, _WIDTH, 3],
            tf.constant(_BOX),
            area_range=(0.08, 1.0),
            min_object_covered=0,
        )
        window = tf.concat([begin[:2], extent[:2]], axis=0)
        image = tf.image.decode_and_crop_jpeg(
            tf.io.read_file(name), window, channels=3
        )
        return tf.image.resize(image, [size, size])

    return _batches(count, batch, decoded)


def _batches(
    count: int, batch: int, image_of: Callable[[tf.Tensor], tf.Tensor]
) -> tf.data.Dataset:
    """Returns batches of flipped images in a drawn order, without an end."""

    def sample(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.image.random_flip_left_right(image_of(index))
        label = tf.cast(tf.math.floormod(index, _CLASSES), tf.int32)
        return tf.cast(image, tf.uint8), label

    indices = tf.data.Dataset.range(count).shuffle(count).repeat()
    data = indices.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    return data.batch(batch, drop_remainder=True)


def _drawn(index: int, height: int, width: int) -> np.ndarray:
    """Returns an image of smooth colours: noise would be slow to decode."""
    rng = np.random.default_rng(index)
    colours = rng.uniform(0, 255, (_PATCHES, _PATCHES, 3))
    with tf.device("CPU:0"):
        image = tf.image.resize(colours, [height, width], "bicubic").numpy()
    image += 4 * rng.standard_normal(image.shape, "float32")
    return np.clip(image, 0, 255).astype("uint8")


SOURCES = {
    "synthetic": _synthetic,
    "memory": _in_memory,
    "files": _from_files,
}

if __name__ == "__main__":
    main()
