"""The Keras models that are timed."""

import functools
from typing import Any

import keras
from keras import layers
from keras import ops


def build(name: str, **options: Any) -> keras.Model:
    """Makes a model, compiled but for `jit_compile`.

    Args:
        name: One of `examples.benchmarks.cases`.
        options: What its function takes.
    """
    return _BUILDERS[name](**options)


def application(name: str) -> keras.Model:
    """A network of `keras.applications` for 1,000 classes."""
    make: Any = getattr(keras.applications, name)
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
    head_dtype: str | None = "float32",
) -> keras.Model:
    """A decoder, by default of 134.2 million parameters.

    Depth and width are those of GPT-2 small (Radford et al. 2019), which has
    124 million: here the head has weights of its own, and there are no
    positions.

    Args:
        depth: How many blocks it has.
        width: Of each token.
        heads: Of each attention.
        length: Of each sequence.
        vocabulary: How many tokens there are.
        head_dtype: What the last layer computes in; `None` means as the others
            do. The loss is computed in float32 in any case.
    """
    tokens = layers.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = x + attention(h, h, use_causal_mask=True)
        x = x + _perceptron(layers.LayerNormalization()(x), width)
    x = layers.LayerNormalization()(x)
    head = layers.Dense(vocabulary, dtype=head_dtype)
    model = keras.Model(tokens, head(x))
    model.compile(keras.optimizers.AdamW(1e-4), _cross_entropy())
    return model


def vit(
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    size: int = 224,
    patch: int = 16,
    classes: int = 1000,
    dropout: float = 0.0,
) -> keras.Model:
    """ViT-B/16 (Dosovitskiy et al. 2021, arXiv 2010.11929).

    Args:
        depth: How many blocks it has.
        width: Of each patch.
        heads: Of each attention.
        size: Of an image's sides, in pixels.
        patch: Of a patch's sides, in pixels.
        classes: How many there are.
        dropout: The rate after positions, attentions and perceptrons.
    """
    images = layers.Input((size, size, 3))
    x = layers.Conv2D(width, patch, strides=patch)(images)
    x = ClassToken()(layers.Reshape((-1, width))(x))
    x = _dropped(Positions()(x), dropout)
    for _ in range(depth):
        h = layers.LayerNormalization(epsilon=1e-6)(x)
        h = layers.MultiHeadAttention(heads, width // heads)(h, h)
        x = x + _dropped(h, dropout)
        h = layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + _dropped(_perceptron(h, width), dropout)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    model = keras.Model(images, layers.Dense(classes)(x[:, 0]))
    model.compile(keras.optimizers.AdamW(1e-4), _cross_entropy())
    return model


def bert(
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    length: int = 512,
    vocabulary: int = 30_522,
    has_wide_mask: bool = False,
) -> keras.Model:
    """BERT base, told to sort texts (Devlin et al. 2019, arXiv 1810.04805).

    The texts are padded with zeros, which no attention sees. A text is one
    segment, so there is no embedding of segments. There is no dropout.

    Args:
        depth: How many blocks it has.
        width: Of each token.
        heads: Of each attention.
        length: Of each text.
        vocabulary: How many tokens there are.
        has_wide_mask: Whether each query has a row of the mask, though all rows
            of a text are alike. Keras on JAX fuses no attention without.
    """
    tokens = layers.Input((length,), dtype="int32")
    # Given to each attention, as Keras takes the mask of `mask_zero=True` from
    # `x` when `x` is attended to, so `x + attended` and what follows lose it.
    seen = ops.expand_dims(ops.not_equal(tokens, 0), axis=1)
    if has_wide_mask:
        seen = ops.repeat(seen, length, axis=1)
    x = _normalised(Positions()(layers.Embedding(vocabulary, width)(tokens)))
    for _ in range(depth):
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = _normalised(x + attention(x, x, attention_mask=seen))
        x = _normalised(x + _perceptron(x, width))
    first = layers.Dense(width, activation="tanh")(x[:, 0])
    model = keras.Model(tokens, layers.Dense(2)(first))
    model.compile(keras.optimizers.AdamW(1e-5), _cross_entropy())
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


class ClassToken(layers.Layer):
    """Puts one learned token before the others."""

    def build(self, shape: tuple) -> None:
        """Makes the token."""
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")

    def call(self, x: Any) -> Any:
        """Returns one token more."""
        token = ops.zeros_like(x[:, :1]) + self.token
        return ops.concatenate([token, x], axis=1)


class Positions(layers.Layer):
    """Adds what is learned of each place in a sequence."""

    def build(self, shape: tuple) -> None:
        """Makes a vector for each place."""
        self.table = self.add_weight(
            shape=shape[1:],
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="table",
        )

    def call(self, x: Any) -> Any:
        """Returns the sum."""
        return x + self.table


def _perceptron(x: Any, width: int) -> Any:
    hidden = layers.Dense(4 * width, activation="gelu")(x)
    return layers.Dense(width)(hidden)


def _dropped(x: Any, rate: float) -> Any:
    return layers.Dropout(rate)(x) if rate else x


def _normalised(x: Any) -> Any:
    return layers.LayerNormalization(epsilon=1e-12)(x)


def _cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# Of the sizes of GPT-3 Medium and XL (Brown et al. 2020, arXiv 2005.14165).
_SIZES_350M = {"depth": 24, "width": 1024, "heads": 16, "head_dtype": None}
_SIZES_1_3B = {"depth": 24, "width": 2048, "heads": 16, "head_dtype": None}
_SIZES_5_5B = {"depth": 26, "width": 4096, "heads": 32, "head_dtype": None}
_SIZES_8B = {**_SIZES_5_5B, "depth": 38}

_BUILDERS = {
    "resnet": functools.partial(application, "ResNet50"),
    "mobilenet": functools.partial(application, "MobileNetV2"),
    "efficientnet": functools.partial(application, "EfficientNetV2S"),
    "convnext": functools.partial(application, "ConvNeXtTiny"),
    "xception": functools.partial(application, "Xception"),
    "gpt": gpt,
    "gpt-bf16": functools.partial(gpt, head_dtype=None),
    "gpt-350m": functools.partial(gpt, **_SIZES_350M),
    "gpt-1.3b": functools.partial(gpt, **_SIZES_1_3B),
    "gpt-5.5b": functools.partial(gpt, **_SIZES_5_5B),
    "gpt-8b": functools.partial(gpt, **_SIZES_8B),
    "vit": vit,
    "vit-dropout": functools.partial(vit, dropout=0.1),
    "bert": bert,
    "small": small,
}
