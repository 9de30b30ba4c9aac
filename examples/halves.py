"""Learns which halves of handwritten digits belong together, on all devices.

    python examples/halves.py [--epochs 10] [--devices 4]

Two networks map the upper and the lower half of an image to a point each. The
loss compares each upper half with the lower halves of the whole batch, as CLIP
does with images and texts. A replica has a part of the batch only, but `fit`
computes the loss on the samples of all replicas, and training is what it is on
one device.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from digits import choose
from digits import load_data

import keras_conflux as kc


def contrast(upper, lower):
    """How badly each half finds its other half among those of the batch."""
    scores = 10 * keras.ops.matmul(upper, keras.ops.transpose(lower))
    partner = keras.ops.arange(keras.ops.shape(scores)[0])
    lost = keras.losses.sparse_categorical_crossentropy
    return (
        lost(partner, scores, from_logits=True)
        + lost(partner, keras.ops.transpose(scores), from_logits=True)
    ) / 2


class Halves(keras.Model):
    """Two networks, and a loss that takes what both return."""

    def __init__(self):
        super().__init__()
        self.upper, self.lower = self.network(), self.network()

    def network(self) -> keras.Model:
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input((4, 8, 1)),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(32),
                layers.UnitNormalization(),
            ]
        )

    def call(self, images):
        return self.upper(images[:, :4]), self.lower(images[:, 4:])

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return contrast(*y_pred)


def train(images, epochs, devices=None) -> Halves:
    """Trains on some devices, or with plain Keras if none are given."""
    keras.utils.set_random_seed(0)
    model = Halves()
    model.compile("adam")
    if devices is not None:
        kc.replicate(model, devices)
    model.fit(images, batch_size=128, epochs=epochs, verbose=0)
    return model


def accuracy(model, images) -> float:
    """Among 20 images, how often an upper half's partner is the nearest."""
    upper, lower = model.predict(images, verbose=0)
    found = [
        np.argmax(upper[i : i + 20] @ lower[i : i + 20].T, axis=1)
        == np.arange(20)
        for i in range(0, len(images) // 20 * 20, 20)
    ]
    return float(np.mean(found))


def main() -> None:
    devices, epochs = choose(__doc__, epochs=10)
    (images, _), (test_images, _) = load_data()
    model = train(images, epochs, devices)
    kc.assert_in_sync(model)
    single = train(images, epochs)
    for count, each in ((len(devices), model), (1, single)):
        noun = "device" if count == 1 else "devices"
        found = accuracy(each, test_images)
        print(f"test accuracy on {count} {noun}: {found:.2%}")
    points = [each.predict(test_images, verbose=0) for each in (model, single)]
    difference = max(
        np.abs(many - one).max() for many, one in zip(*points, strict=True)
    )
    print(f"the points differ by at most {difference:.1e}")


if __name__ == "__main__":
    main()
