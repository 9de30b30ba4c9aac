"""Attention by a fused kernel, with its gradients.

A kernel needs known shapes. Only it sees them: tensors that go back to the
program have the shapes that it is traced for.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._extensions.kernels import cudnn
from keras_conflux._extensions.kernels.masks import Mask

_Tensors = Sequence[tf.Tensor]
_WithGradient = tuple[Any, Callable[..., list[tf.Tensor]]]
_custom_gradient: Any = tf.custom_gradient


@dataclasses.dataclass(frozen=True)
class Fused:
    """Attention of queries `(B, T, N, H)` to keys and values `(B, S, K, H)`."""

    form: cudnn.Form
    shapes: Sequence[tf.TensorShape]
    """The shapes of queries, keys and values where the kernel computes."""
    mask: Mask | None
    composed: Callable[..., tf.Tensor]
    """Computes the same from queries, keys and values."""
    note: Callable[[_Tensors, _Tensors], None]
    """Called with the outputs, and their inputs."""

    def __call__(
        self, queries: tf.Tensor, keys: tf.Tensor, values: tf.Tensor
    ) -> tf.Tensor:
        """Returns the output, `(B, T, N, H)`."""

        @_custom_gradient
        def attention(*inputs: tf.Tensor) -> _WithGradient:
            known = self._forward(inputs)
            (output,) = _opened(known[:1], inputs[:1])
            self.note([output], inputs)
            return output, lambda slopes: self._gradients(inputs, known, slopes)

        return attention(queries, keys, values)

    def _forward(self, inputs: _Tensors) -> list[tf.Tensor]:
        """Returns the output and the statistics."""
        queries, keys, values = map(tf.ensure_shape, inputs, self.shapes)
        bias = None if self.mask is None else self.mask.bias(queries.dtype)
        found = cudnn.forward(queries, keys, values, bias, self.form)
        if self.mask is not None:
            found[0] = self.mask.with_means(found[0], values)
        return found

    def _gradients(
        self, inputs: _Tensors, known: _Tensors, upstream: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients of queries, keys and values.

        The gradients of these gradients come from the composed form.
        """

        @_custom_gradient
        def gradients(*given: tf.Tensor) -> _WithGradient:
            *inputs, upstream = given
            found = self._backward(inputs, known, upstream)
            found = _opened(found, inputs)
            self.note(found, given)
            return found, lambda *seconds: _gradients_of(
                self._composed_gradients, given, seconds
            )

        return gradients(*inputs, upstream)

    def _backward(
        self, inputs: _Tensors, known: _Tensors, upstream: tf.Tensor
    ) -> list[tf.Tensor]:
        queries, keys, values = map(tf.ensure_shape, inputs, self.shapes)
        output, statistics = known
        upstream = tf.ensure_shape(upstream, output.shape)
        bias = None
        if self.mask is not None:
            bias = self.mask.bias(queries.dtype)
            statistics = self.mask.without_hidden(statistics)
        given = queries, keys, values, bias, self.form
        found = cudnn.backward(*given, output, statistics, upstream)
        if self.mask is not None:
            found[2] += self.mask.slope_of_means(upstream, values)
        return found

    def _composed_gradients(self, *given: tf.Tensor) -> list[tf.Tensor]:
        *inputs, upstream = given
        return _gradients_of(self.composed, inputs, [upstream])


def _opened(tensors: _Tensors, like: _Tensors) -> list[tf.Tensor]:
    """Returns tensors of the shapes that others are traced with."""
    # To XLA, a slice of all is nothing. A reshape would have a known shape.
    return [
        tensor
        if other.shape.is_fully_defined()
        else tf.slice(tensor, [0] * len(other.shape), tf.shape(other))
        for tensor, other in zip(tensors, like, strict=True)
    ]


def _gradients_of(
    function: Callable[..., Any], inputs: _Tensors, slopes: _Tensors
) -> list[tf.Tensor]:
    """Returns the gradients of a function's outputs by its inputs."""
    # `tf.gradients` wants tensors of the graph that is being traced.
    copies = [tf.identity(each) for each in inputs]
    return tf.gradients(function(*copies), copies, [*slopes])
