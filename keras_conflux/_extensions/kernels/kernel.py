"""The interface of fused attention's kernels, and of its forms."""

import dataclasses
from typing import Protocol

import tensorflow as tf

from keras_conflux._replication.steps import Step


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of an attention, apart from its tensors."""

    scale: float
    """The factor of the products of queries and keys."""
    is_causal: bool
    """Whether query `t` attends to the keys 0 to `t` only."""


class Kernel(Protocol):
    """Computes attention without writing out the scores.

    B is the number of samples, T of queries, S of keys, N of heads, K of heads
    of keys and values, and H the size of a head. N is a multiple of K. All
    shapes are known while tracing.
    """

    def obstacle(self, step: Step) -> str | None:
        """Returns why the program that is traced cannot use it, if so."""
        ...

    def forward(
        self,
        queries: tf.Tensor,
        keys: tf.Tensor,
        values: tf.Tensor,
        bias: tf.Tensor | None,
        form: Form,
        with_statistics: bool,
    ) -> list[tf.Tensor]:
        """Returns the output and, if asked for, the statistics.

        Args:
            queries: Queries of shape `(B, T, N, H)`.
            keys: Keys of shape `(B, S, K, H)`.
            values: Values of shape `(B, S, K, H)`.
            bias: The summand of the scores: `(B or 1, N or 1, T, S)`.
            form: The form of the attention.
            with_statistics: Whether to return the statistics for `backward`:
                float32 of shape `(B, N, T)`.
        """
        ...

    def backward(
        self,
        queries: tf.Tensor,
        keys: tf.Tensor,
        values: tf.Tensor,
        bias: tf.Tensor | None,
        form: Form,
        output: tf.Tensor,
        statistics: tf.Tensor,
        upstream: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the gradients of queries, keys and values.

        Args:
            queries: As in `forward`, like the next four.
            keys: As in `forward`.
            values: As in `forward`.
            bias: As in `forward`. It gets no gradient.
            form: As in `forward`.
            output: The output of `forward`.
            statistics: The statistics of `forward`.
            upstream: The gradient of the output.
        """
        ...
