"""A batch times a matrix, as one product of two matrices.

Keras' `einsum` multiplies a batch of sequences by a matrix of weights with
`tf.matmul`, whose gradient is a matrix of weights for each sample, and the sum
of these: XLA writes all of them to memory. It also cannot add a bias within a
product whose columns have more than one axis. Here, the samples and positions
are rows of one matrix, and a bias is added before its columns get their axes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._replication import steps


def einsum(
    original: Callable, subscripts: str, *operands: Any, **options: Any
) -> Any:
    """Computes a product of a batch and a matrix within an XLA program."""
    result = None
    if traces_for_xla() and len(operands) == 2 and not options:
        result = product(subscripts, *operands)
    if result is None:
        return original(subscripts, *operands, **options)
    return result


def einsum_dense(
    original: Callable, layer: Any, inputs: Any, training: Any = None
) -> Any:
    """Adds the bias of an `EinsumDense` within its product."""
    if not traces_for_xla() or getattr(layer, "bias", None) is None:
        return original(layer, inputs, training=training)
    kernel = layer.kernel  # which some layers compute each time it is read
    outputs = product(layer.equation, inputs, kernel, layer.bias)
    if outputs is None:
        outputs = keras.ops.einsum(layer.equation, inputs, kernel)
        outputs = keras.ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def traces_for_xla() -> bool:
    """Whether a step is traced that XLA compiles."""
    return steps.in_xla() and not tf.executing_eagerly()


def product(
    subscripts: str, batch: Any, weights: Any, *bias: Any
) -> tf.Tensor | None:
    """Returns the product, or `None` where it is Keras' to compute."""
    form = _Form.from_subscripts(subscripts)
    if form is None or not isinstance(batch, tf.Tensor):
        return None
    if not isinstance(weights, (tf.Tensor, tf.Variable, keras.Variable)):
        return None
    if batch.shape.rank is None or _would_hide_samples(batch):
        return None
    tensors = [batch, *map(keras_variables.as_tensor, (weights, *bias))]
    return form.product(*tensors) if form.fits(*tensors) else None


def _would_hide_samples(batch: tf.Tensor) -> bool:
    """Whether the rows of one matrix could not be told to be of samples.

    Where a step of `fit` has a fixed number of samples in its graph, no axis of
    such a matrix is known to be theirs.
    """
    step = steps.current()
    follows_samples = step is not None and step.kinds is not None
    return follows_samples and batch.shape[:1] != [None]


@dataclasses.dataclass(frozen=True)
class _Form:
    """An equation whose second operand is a matrix, by the axes' letters.

    Attributes:
        rows: The first axes of the batch and of the product.
        summed: The last axes of the batch.
        columns: The last axes of the product.
        weights: The axes of the second operand, in its order.
    """

    rows: str
    summed: str
    columns: str
    weights: str

    @classmethod
    def from_subscripts(cls, subscripts: str) -> "_Form | None":
        """Returns the form of an equation, if it is such a product."""
        left, _, product = subscripts.replace(" ", "").partition("->")
        batch, _, weights = left.partition(",")
        summed = "".join(x for x in batch if x not in product)
        columns = "".join(x for x in product if x not in batch)
        rows = batch.removesuffix(summed)
        terms = (batch, weights, product)
        is_product = (
            all(x.isascii() and x.isalpha() for x in terms)
            and all(len({*x}) == len(x) for x in terms)
            and len(rows) > 1
            and summed
            and columns
            and batch.endswith(summed)
            and product == rows + columns
            and sorted(weights) == sorted(summed + columns)
        )
        return cls(rows, summed, columns, weights) if is_product else None

    def fits(
        self, batch: tf.Tensor, weights: tf.Tensor, *bias: tf.Tensor
    ) -> bool:
        """Whether tensors have these axes, one dtype, and sizes that agree.

        All sizes but the number of samples have to be known, and not zero.
        """
        tensors = (batch, weights, *bias)
        ranks = len(self.rows + self.summed), len(self.weights)
        if (batch.shape.rank, weights.shape.rank) != ranks:
            return False
        summed = self._sizes(weights, self.summed)
        columns = self._sizes(weights, self.columns)
        return (
            batch.dtype.is_floating
            and {x.dtype for x in tensors} == {batch.dtype}
            and all([*batch.shape[1:], *weights.shape])
            and [*batch.shape[len(self.rows) :]] == summed
            and all([*x.shape] == columns for x in bias)
        )

    def product(
        self, batch: tf.Tensor, weights: tf.Tensor, *bias: tf.Tensor
    ) -> tf.Tensor:
        """Returns the product of tensors that fit, with the bias added."""
        columns = self._sizes(weights, self.columns)
        order = [self.weights.index(x) for x in self.summed + self.columns]
        if order != sorted(order):
            weights = tf.transpose(weights, order)
        matrix = tf.reshape(weights, [-1, math.prod(columns)])
        product = tf.reshape(batch, [-1, matrix.shape[0]]) @ matrix
        for each in bias:
            product += tf.reshape(each, [-1])
        positions = batch.shape[1 : len(self.rows)]
        return tf.reshape(product, [-1, *positions, *columns])

    def _sizes(self, weights: tf.Tensor, axes: str) -> list[Any]:
        """Returns the sizes of some axes of the weights."""
        return [weights.shape[self.weights.index(x)] for x in axes]
