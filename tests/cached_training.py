"""Trains a model whose programs are kept on disk, on a CPU, and prints JSON.

    python cached_training.py '{"units": 8, ...}' ...

Each argument is a training; see `train`.
"""

import json
import logging
import os
import resource
import signal
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

import keras_conflux as kc
from keras_conflux._extensions.program_cache import compat
from keras_conflux._extensions.program_cache import setup


class Lines(logging.Handler):
    """Collects what the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(
    name: str = "small",
    units: int = 8,
    others: int = 0,
    file_bytes: int = resource.RLIM_INFINITY,
) -> dict:
    """Trains a model for four steps.

    Args:
        name: What the model is called.
        units: How wide it is.
        others: How many other functions are traced before.
        file_bytes: How large files may become.
    """
    for _ in range(others):
        tf.function(lambda x: x + 1).get_concrete_function(tf.ones(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, limits[1]))
    lines = Lines()
    logger = logging.getLogger("keras_conflux")
    logger.addHandler(lines)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(units, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="output"),
        ],
        name=name,
    )
    optimizer = keras.optimizers.Adam(name="adam")  # not numbered
    model.compile(optimizer, "mse", jit_compile=True)
    kc.replicate(model, 1)
    data = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        losses = model.fit(
            data, data[:, :1], batch_size=8, epochs=2, verbose=0
        ).history["loss"]
    logger.removeHandler(lines)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {
        "losses": losses,
        "steps": int(model.optimizer.iterations),
        "log": [line for line in lines.lines if line.startswith(name)],
        "kept": [line for line in lines.lines if "could not" in line],
        "warnings": [
            str(each.message)
            for each in warned
            if issubclass(each.category, kc.ConfluxWarning)
        ],
    }


def main() -> None:
    """Prints a result for each argument."""
    asked = compat.has_listed_devices()
    assert not asked, "importing has asked TensorFlow for devices"
    logging.getLogger("keras_conflux").setLevel(logging.INFO)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    setup.enable("test", hardware={"CPU": "this one"})
    with tf.device("CPU:0"):  # what others compile is not kept
        tf.function(lambda x: x + 1, jit_compile=True)(tf.ones(1))
    results = [train(**json.loads(each)) for each in sys.argv[1:]]
    flags = [name for name in os.environ if name.endswith("XLA_FLAGS")]
    print(json.dumps({"trainings": results, "flags": flags}))


if __name__ == "__main__":
    main()
