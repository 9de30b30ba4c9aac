"""Trains on real handwritten digits, in several processes.

    keras-conflux run --processes 2 examples/several_processes.py [--epochs 12]

Slurm, `mpirun` and Kubernetes start the same program on several hosts. Started
by `python examples/several_processes.py`, it is one process.

It trains twice: with data that all processes read, and with data of which each
reads a part. The batches have the same samples in all these cases, so all
compute the same, up to roundings, which grow in training.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras_conflux as kc

kc.initialize()  # before anything else uses TensorFlow

import argparse

import keras
import tensorflow as tf
from digits import build_model
from digits import load_data

BATCH_SIZE = 60  # which 2, 3, 4, 5 and 6 processes divide evenly


def batches_for_all(samples: tf.data.Dataset) -> tf.data.Dataset:
    """Every process draws whole batches, and computes its rows of each."""
    return samples.batch(BATCH_SIZE)


def batches_of_own(samples: tf.data.Dataset) -> tf.data.Dataset:
    """Every process draws its own samples, and computes all that it draws.

    Together, the processes' batches are those of `batches_for_all`. Where data
    are read from files, deal out the files instead: `kc.shard(files)`.
    """
    count = kc.process_count()
    mine = samples.shard(count, kc.process_index())
    return mine.batch(BATCH_SIZE // count)


def train(data: str, epochs: int) -> keras.Model:
    """Trains with data that are `"global"` or `"local"`."""
    keras.utils.set_random_seed(0)
    train_data, _ = load_data()
    samples = tf.data.Dataset.from_tensor_slices(train_data).shuffle(2000)
    batches = batches_for_all if data == "global" else batches_of_own
    model = kc.replicate(build_model(), data=data)
    model.fit(batches(samples), epochs=epochs, verbose=0)
    return model


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--epochs", type=int, default=12)
    epochs = arguments.parse_args().epochs
    _, test = load_data()
    for data in ("global", "local"):
        model = train(data, epochs)
        # All processes get the numbers of all samples.
        part = kc.shard(test) if data == "local" else test
        loss, accuracy = model.evaluate(*part, verbose=0)
        if kc.process_index() == 0:
            print(
                f"{data} data, number of processes: {kc.process_count()}, "
                f"test accuracy: {accuracy:.2%}, loss: {loss:.6f}"
            )


if __name__ == "__main__":
    main()
