"""Rotates images inside of a step that XLA compiles.

XLA has no kernel for what TensorFlow rotates, zooms, moves and shears images
with. So a model that has Keras' `RandomRotation` trains without XLA, all of it.
`Rotation` gathers pixels instead, and gives the images of `RandomRotation`.

    python examples/augmentation.py
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_conflux as kc


class Rotation(keras.layers.RandomRotation):
    """`RandomRotation` with its defaults, for steps that XLA compiles."""

    def __init__(self, factor: Any, **options: Any) -> None:
        super().__init__(factor, **options)
        self.supports_jit = True

    def transform_images(
        self, images: Any, transformation: Any, training: bool = True
    ) -> Any:
        """Returns the images, rotated if it is for training."""
        images = tf.cast(images, self.compute_dtype)
        if not training:
            return images
        return transformed(images, transformation["rotation_matrix"])


def transformed(images: Any, matrices: Any) -> Any:
    """Returns images of which each has been moved by an affine map.

    Pixels are interpolated linearly. What lies outside is reflected, as with
    `keras.ops.image.affine_transform(fill_mode="reflect")`.

    Args:
        images: Of shape `(images, height, width, channels)`.
        matrices: Of shape `(images, 8)`: from where each pixel is taken.
    """
    _, height, width, channels = images.shape
    y, x = tf.meshgrid(
        tf.range(height, dtype="float32"),
        tf.range(width, dtype="float32"),
        indexing="ij",
    )
    m = tf.cast(matrices, "float32")[:, :, None, None]
    x, y = (
        _reflected(m[:, i] * x + m[:, i + 1] * y + m[:, i + 2], size)
        for i, size in ((0, width), (3, height))
    )
    left, top = tf.floor(x), tf.floor(y)
    pixels = tf.reshape(images, [-1, height * width, channels])
    total: Any = 0
    for column, row in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at_x, at_y = left + column, top + row
        weight = (1 - tf.abs(x - at_x)) * (1 - tf.abs(y - at_y))
        place = tf.minimum(at_y, height - 1) * width
        place += tf.minimum(at_x, width - 1)
        found = tf.gather(pixels, tf.cast(place, "int32"), batch_dims=1)
        total += tf.cast(found, "float32") * weight[..., None]
    return tf.cast(total, images.dtype)


def _reflected(place: Any, size: int) -> Any:
    """Returns where a place lies when the image goes on as in mirrors."""
    place = tf.math.floormod(place + 0.5, 2.0 * size)
    place = tf.minimum(place, 2.0 * size - place) - 0.5
    return tf.clip_by_value(place, 0.0, size - 1.0)


def main() -> None:
    """Trains on images that are flipped and rotated in the step."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (256, 32, 32, 3), dtype="uint8")
    labels = (images.mean((1, 2, 3)) > 127.5).astype("int32")
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3), dtype="uint8"),
            keras.layers.RandomFlip("horizontal"),
            Rotation(0.1),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    kc.replicate(model)
    model.fit(images, labels, batch_size=64, epochs=3, verbose=2)


if __name__ == "__main__":
    main()
