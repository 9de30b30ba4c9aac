"""Trains a language model whose logits are never all in memory.

The logits of a step are tokens times words: 2.1 GB a copy for 16,384 tokens and
32,000 words in float32, and a step holds several copies. `Vocabulary` ends a
model in place of a `Dense` layer, and its `loss` computes the logits of some
positions at a time, and once more for the gradient. Metrics cannot read logits
then.

    python examples/vocabulary_in_parts.py
"""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops

import keras_conflux as kc


class Vocabulary(layers.Layer):
    """Scores all words of a vocabulary, a part of the positions at a time.

    Args:
        words: How many there are.
        parts: In how many parts the positions of a text are scored, which have
            to divide their number.
        options: Of the layer.
    """

    def __init__(self, words: int, parts: int = 8, **options: Any) -> None:
        super().__init__(**options)
        self.words, self.parts = words, parts

    def build(self, shape: Any) -> None:
        """Makes the weights of a `Dense` layer."""
        self.kernel = self.add_weight(shape=(shape[-1], self.words))
        self.bias = self.add_weight(shape=(self.words,), initializer="zeros")

    def call(self, x: Any, as_logits: bool = False) -> Any:
        """Returns what `loss` takes, or logits, for a model that predicts."""
        return ops.matmul(x, self.kernel) + self.bias if as_logits else x

    def loss(self, labels: Any, x: Any) -> Any:
        """Returns the cross entropy of each token, in float32."""
        dtype = self.compute_dtype
        weights = ops.cast(self.kernel, dtype), ops.cast(self.bias, dtype)
        labels = ops.cast(labels, "int32")

        @tf.custom_gradient
        def losses(x: Any, kernel: Any, bias: Any) -> Any:
            def in_parts(tensor: Any) -> list[Any]:
                return tf.split(tensor, self.parts, axis=1)

            def logits_of(part: Any) -> Any:
                return ops.cast(ops.matmul(part, kernel) + bias, "float32")

            entropies, of_texts = [], []
            for part, words in zip(*map(in_parts, (x, labels)), strict=True):
                entropies.append(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(
                        words, logits_of(_after(of_texts, part))
                    )
                )
                # By text, so that replicas need not exchange it.
                of_texts = [ops.min(entropies[-1], axis=1)[:, None, None]]
            result = tf.concat(entropies, 1)

            def gradient(upstream: Any) -> Any:
                to_x, to_kernel, to_bias, before = [], 0.0, 0.0, []
                backwards = zip(
                    *(in_parts(each)[::-1] for each in (x, labels, upstream)),
                    strict=True,
                )
                for part, words, up in backwards:
                    logits = logits_of(_after(before, part))
                    wrong = ops.softmax(logits) - ops.one_hot(words, self.words)
                    wrong = wrong * up[..., None]
                    to_bias += ops.sum(wrong, axis=(0, 1))
                    wrong = ops.cast(wrong, dtype)
                    to_x.append(ops.matmul(wrong, ops.transpose(kernel)))
                    to_kernel += tf.tensordot(part, wrong, [[0, 1], [0, 1]])
                    before = map(ops.min, (to_x[-1], to_kernel, to_bias))
                return (
                    tf.concat(to_x[::-1], 1),
                    to_kernel,
                    ops.cast(to_bias, dtype),
                )

            return result, gradient

        return losses(ops.cast(x, dtype), *weights)


def _after(before: Iterable[Any], tensor: Any) -> Any:
    """Returns a tensor, which XLA computes with when others are known.

    It would otherwise compute all parts at once, and keep what is computed
    again. So it has to add what is always zero, which it does not know.
    """
    for each in before:
        tensor += ops.cast(each < -1e30, tensor.dtype)
    return tensor


def main() -> None:
    """Trains on texts in which each word is the one before plus one."""
    words, length = 512, 64
    rng = np.random.default_rng(0)
    texts = (rng.integers(words, size=(64, 1)) + np.arange(length + 1)) % words
    tokens = keras.Input((length,), dtype="int32")
    hidden = layers.Dense(64)(layers.Embedding(words, 64)(tokens))
    vocabulary = Vocabulary(words)
    model = keras.Model(tokens, vocabulary(hidden))
    model.compile(keras.optimizers.Adam(0.01), loss=vocabulary.loss)
    kc.replicate(model)
    model.fit(texts[:, :-1], texts[:, 1:], epochs=10, verbose=2)
    speaker = keras.Model(tokens, vocabulary(hidden, as_logits=True))
    said = speaker.predict(texts[:1, :-1], verbose=0).argmax(-1)[0]
    print(f"right: {np.mean(said == texts[0, 1:]):.0%}")


if __name__ == "__main__":
    main()
