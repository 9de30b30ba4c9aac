"""Trains on real handwritten digits, on every device and on one.

    python examples/digits.py [--epochs 12] [--devices 4]

Uses all GPUs, or 4 logical CPU devices on a machine without one. The data,
1,797 images of 8x8 pixels, ships inside scikit-learn.

Both models compute the same, up to roundings, which grow in training. A model
whose `BatchNormalization` is not synchronized would differ, as each device
would normalize by its own samples.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_conflux as kc


def build_model() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Activation("relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def choose(description, epochs=12):
    """Returns the devices and the number of epochs to use."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--epochs", type=int, default=epochs)
    arguments.add_argument("--devices", type=int, default=None)
    options = arguments.parse_args()
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    devices = kc.devices(options.devices or (None if on_gpu else 4))
    print("devices:", ", ".join(devices))
    return devices, options.epochs


def load_data():
    """Returns (images, labels) to train with and (images, labels) to test."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def serve(model: keras.Model, inputs: np.ndarray) -> None:
    """Exports the model and has serve.py, another process, serve it."""
    script = pathlib.Path(__file__).with_name("serve.py")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        model.export(path / "model", verbose=False)
        np.save(path / "inputs.npy", inputs)
        command = [sys.executable, script, "model", "inputs.npy", "outputs.npy"]
        subprocess.run(command, cwd=folder, check=True)
        served = np.load(path / "outputs.npy")
    expected = model.predict(tf.constant(inputs), verbose=0)
    difference = np.abs(served - expected).max()
    print(f"served without keras_conflux, {difference:.1e} from predict")
    assert difference < 2e-3  # GPUs multiply in TF32, of 11 bits


def main() -> None:
    devices, epochs = choose(__doc__)
    (train_x, train_y), (test_x, test_y) = load_data()
    data = dict(x=train_x, y=train_y, batch_size=64)

    keras.utils.set_random_seed(0)
    model = kc.replicate(build_model(), devices)
    model.fit(**data, epochs=epochs)
    kc.assert_in_sync(model)

    keras.utils.set_random_seed(0)
    single = build_model()
    single.fit(**data, epochs=epochs, verbose=0)

    for count, each in ((len(devices), model), (1, single)):
        _, accuracy = each.evaluate(test_x, test_y, verbose=0)
        noun = "device" if count == 1 else "devices"
        print(f"test accuracy on {count} {noun}: {accuracy:.2%}")
    predicted = [each.predict(test_x, verbose=0) for each in (model, single)]
    difference = np.abs(predicted[0] - predicted[1]).max()
    print(f"the predicted probabilities differ by at most {difference:.1e}")
    serve(model, test_x)


if __name__ == "__main__":
    main()
