"""What is trained: data of each kind, and how much a step does.

All that is measured imports this file, also what has no Keras.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

Data = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Makes a batch of so many samples: inputs and labels."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Data for a model, and how much a step of it does."""

    data: Data
    """Makes a batch of so many samples."""
    batch_size: int
    """Samples per device."""
    unit: str
    """What throughput counts."""
    units: int = 1
    """How many of them a sample has."""
    dtype: str = "mixed_bfloat16"
    """The dtype policy of Keras."""


def _images(size: int, classes: int) -> Data:
    def data(count: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (count, size, size, 3), dtype="uint8")
        return images, rng.integers(0, classes, count, dtype="int32")

    return data


def _text(length: int, vocabulary: int) -> Data:
    def data(count: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, vocabulary, (count, length + 1), dtype="int32")
        return tokens[:, :-1], tokens[:, 1:]

    return data


def _padded_text(shortest: int, length: int, vocabulary: int) -> Data:
    """Sequences of drawn lengths. Behind the end of each, tokens are 0."""

    def data(count: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        tokens = rng.integers(1, vocabulary, (count, length), dtype="int32")
        lengths = rng.integers(shortest, length + 1, (count, 1))
        tokens[np.arange(length) >= lengths] = 0
        return tokens, rng.integers(0, 2, count, dtype="int32")

    return data


_GPT = Case(_text(512, 32_000), 32, "tokens", units=512)
_LARGE_GPT = Case(_text(512, 32_000), 8, "tokens", units=512)

_VIT = Case(_images(224, 1000), 128, "images")

CASES = {
    "resnet": Case(_images(224, 1000), 256, "images"),
    "gpt": _GPT,
    "gpt-bf16": _GPT,
    "gpt-350m": _LARGE_GPT,
    "gpt-1.3b": _LARGE_GPT,
    "gpt-5.5b": dataclasses.replace(_LARGE_GPT, batch_size=4),
    "gpt-8b": dataclasses.replace(_LARGE_GPT, batch_size=4),
    "vit": _VIT,
    "vit-dropout": _VIT,
    "mobilenet": Case(_images(224, 1000), 128, "images"),
    "efficientnet": Case(_images(224, 1000), 64, "images"),
    "convnext": Case(_images(224, 1000), 64, "images"),
    "xception": Case(_images(224, 1000), 64, "images"),
    "bert": Case(_padded_text(128, 512, 30_522), 32, "tokens", units=512),
    "small": Case(_images(16, 10), 32, "images", dtype="float32"),
}
