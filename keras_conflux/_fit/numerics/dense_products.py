"""A batch times a matrix, as one product of two matrices.

Keras' `einsum` multiplies a batch of sequences by a matrix of weights with
`tf.matmul`, whose gradient is a matrix of weights for each sample, and the sum
of these: XLA writes all of them to memory. It also cannot add a bias within a
product whose columns have more than one axis. Here, the samples and positions
are the rows of one matrix, and a bias is added before its columns get their
axes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._replication import step_context


def einsum(
    original: Callable, subscripts: str, *operands: Any, **options: Any
) -> Any:
    """Computes a product of a batch and a matrix within an XLA program."""
    if len(operands) != 2 or options:
        return original(subscripts, *operands, **options)
    computed = _computed(subscripts, *operands)
    return original(subscripts, *operands) if computed is None else computed


def einsum_dense(
    original: Callable, layer: Any, inputs: Any, training: Any = None
) -> Any:
    """Adds the bias of an `EinsumDense` within its product."""
    if layer.bias is None:
        return original(layer, inputs, training=training)
    computed = _computed(layer.equation, inputs, layer.kernel, layer.bias)
    if computed is None:
        return original(layer, inputs, training=training)
    return computed if layer.activation is None else layer.activation(computed)


def _computed(
    subscripts: str, batch: Any, weights: Any, bias: Any = None
) -> tf.Tensor | None:
    """Returns the product, or `None` where it is Keras' to compute."""
    context = step_context.current()
    if context is None or not context.in_xla or tf.executing_eagerly():
        return None
    form = _Form.of(subscripts)
    if form is None or not isinstance(batch, tf.Tensor):
        return None
    if not isinstance(weights, (tf.Tensor, tf.Variable, keras.Variable)):
        return None
    given = (weights,) if bias is None else (weights, bias)
    tensors = [batch, *map(_tensor, given)]
    return form.product(*tensors) if form.fits(*tensors) else None


def _tensor(value: Any) -> tf.Tensor:
    """Returns a tensor of the dtype that Keras computes in."""
    converted: Any = keras.ops.convert_to_tensor(value)  # may be a variable
    return tf.convert_to_tensor(converted)


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
    def of(cls, subscripts: str) -> "_Form | None":
        """Returns the form of an equation, if it is such a product."""
        left, _, product = subscripts.replace(" ", "").partition("->")
        batch, _, weights = left.partition(",")
        summed = "".join(x for x in batch if x not in product)
        columns = "".join(x for x in product if x not in batch)
        rows = batch.removesuffix(summed)
        terms = (batch, weights, product)
        is_product = (
            all(x.isalpha() and len({*x}) == len(x) for x in terms)
            and len(rows) > 1
            and summed
            and columns
            and batch == rows + summed
            and product == rows + columns
            and sorted(weights) == sorted(summed + columns)
        )
        return cls(rows, summed, columns, weights) if is_product else None

    def fits(
        self,
        batch: tf.Tensor,
        weights: tf.Tensor,
        bias: tf.Tensor | None = None,
    ) -> bool:
        """Whether tensors have one dtype and sizes that leave one axis open."""
        if batch.shape.rank != len(self.rows + self.summed):
            return False
        if weights.shape.rank != len(self.weights):
            return False
        sizes = [*batch.shape[1:], *weights.shape]
        is_known = batch.dtype.is_floating and all(sizes)
        if bias is None:
            return is_known and weights.dtype == batch.dtype
        return (
            is_known
            and weights.dtype == bias.dtype == batch.dtype
            and list(bias.shape) == self._sizes(weights)
        )

    def product(
        self,
        batch: tf.Tensor,
        weights: tf.Tensor,
        bias: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns the product of tensors that fit, with the bias added."""
        columns = self._sizes(weights)
        order = [self.weights.index(x) for x in self.summed + self.columns]
        if order != sorted(order):
            weights = tf.transpose(weights, order)
        matrix = tf.reshape(weights, [-1, math.prod(columns)])
        product = tf.reshape(batch, [-1, matrix.shape[0]]) @ matrix
        if bias is not None:
            product += tf.reshape(bias, [-1])
        positions = batch.shape[1 : len(self.rows)]
        return tf.reshape(product, [-1, *positions, *columns])

    def _sizes(self, weights: tf.Tensor) -> list[Any]:
        """Returns the sizes of the axes that a product has from its weights."""
        return [weights.shape[self.weights.index(x)] for x in self.columns]
