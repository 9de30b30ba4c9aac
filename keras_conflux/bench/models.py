"""The models that are timed, each with data of its kind."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train and how much a step of it does."""

    build: Callable[[], keras.Model]
    """Makes the model, compiled but for `jit_compile`."""
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]
    """Makes a batch of so many samples."""
    batch_size: int
    """Samples per device."""
    unit: str
    """What throughput counts."""
    units: int = 1
    """How many of them a sample has."""
    dtype: str = "mixed_bfloat16"
    """The dtype policy."""


def resnet() -> keras.Model:
    """ResNet-50 for 1,000 classes (He et al. 2016, arXiv 1512.03385)."""
    make: Any = keras.applications.ResNet50
    model = make(
        weights=None, input_shape=(224, 224, 3), classifier_activation=None
    )
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, _cross_entropy())
    return model


def gpt(
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    length: int = 512,
    vocabulary: int = 32_000,
) -> keras.Model:
    """A decoder of the size of GPT-2 small (Radford et al. 2019)."""
    tokens = layers.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        h = layers.Dense(4 * width, activation="gelu")(h)
        x = x + layers.Dense(width)(h)
    x = layers.LayerNormalization()(x)
    model = keras.Model(tokens, layers.Dense(vocabulary, dtype="float32")(x))
    model.compile(keras.optimizers.AdamW(1e-4), _cross_entropy())
    return model


def small() -> keras.Model:
    """A convolutional network that a CPU trains in milliseconds."""
    model = keras.Sequential(
        [
            layers.Input((16, 16, 3)),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), _cross_entropy())
    return model


def _cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _images(
    size: int, classes: int
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    def data(count: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (count, size, size, 3), dtype="uint8")
        return images, rng.integers(0, classes, count, dtype="int32")

    return data


def _text(
    length: int, vocabulary: int
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    def data(count: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, vocabulary, (count, length + 1), dtype="int32")
        return tokens[:, :-1], tokens[:, 1:]

    return data


CASES = {
    "resnet": Case(resnet, _images(224, 1000), 256, "images"),
    "gpt": Case(gpt, _text(512, 32_000), 32, "tokens", units=512),
    "small": Case(small, _images(16, 10), 32, "images", dtype="float32"),
}
