"""The ops of a reduction, and everything that depends on the choice of one.

A transport knows sums, products, minima and maxima. `MEAN` divides a sum.
"""

import operator
from collections.abc import Callable
from typing import Any
from typing import Literal
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

OpName: TypeAlias = Literal[
    "sum", "mean", "product", "min", "max", "+", "avg", "*", "prod"
]
"""How a user writes an op."""


class Op:
    """How the values of replicas become one value."""

    name: str
    """The name that users and errors call it by."""
    merge_op: str
    """Its name in `CollectiveReduceV2` and `XlaAllReduce`."""
    nccl_op: str
    """Its name in `NcclAllReduce`."""
    of_two: Callable[[Any, Any], Any]
    """Reduces the values of two replicas."""
    is_linear = False
    """Whether `tf.IndexedSlices` can be reduced by gathering their rows."""
    takes_weights = False
    """Whether replicas may count differently."""

    @property
    def reduce_as(self) -> "Op":
        """The op by which a transport reduces."""
        return self

    def neutral(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the scalar that leaves a value as it is."""
        raise NotImplementedError

    def finish(self, reduced: tf.Tensor, count: int) -> tf.Tensor:
        """Returns the result. The count is 1 for weighted replicas."""
        return reduced

    def gradient(
        self, owed: tf.Tensor, x: tf.Tensor, y: tf.Tensor, peers: Any
    ) -> tf.Tensor:
        """Returns the gradient for `x`, of what is owed for all `y`.

        The peers are the `ReplicaCollectives` that have reduced.
        """
        raise NotImplementedError


class _Sum(Op):
    name = "sum"
    merge_op = "Add"
    nccl_op = "sum"
    of_two = staticmethod(operator.add)
    is_linear = True

    def neutral(self, dtype: tf.DType) -> tf.Tensor:
        # -0.0 leaves every float as it is when it is added, -0.0 included. It
        # is an array, as TensorFlow keeps numbers and takes 0.0 for the same.
        zero = -0.0 if dtype.is_floating else 0
        return tf.constant(np.full([], zero, dtype.as_numpy_dtype), dtype)

    def gradient(
        self, owed: tf.Tensor, x: tf.Tensor, y: tf.Tensor, peers: Any
    ) -> tf.Tensor:
        return owed


class _Mean(_Sum):
    name = "mean"
    takes_weights = True

    @property
    def reduce_as(self) -> Op:
        return SUM

    def finish(self, reduced: tf.Tensor, count: int) -> tf.Tensor:
        if not reduced.dtype.is_floating:
            exact = tf.cast(reduced, tf.float64) / count
            return tf.cast(exact, keras.config.floatx())
        if count == 1:
            return reduced
        return reduced / tf.cast(count, reduced.dtype)


class _Product(Op):
    name = "product"
    merge_op = "Mul"
    nccl_op = "prod"
    of_two = staticmethod(operator.mul)

    def neutral(self, dtype: tf.DType) -> tf.Tensor:
        return tf.constant(1, dtype)

    def gradient(
        self, owed: tf.Tensor, x: tf.Tensor, y: tf.Tensor, peers: Any
    ) -> tf.Tensor:
        # Not y / x: a factor may be zero.
        product = tf.ones_like(x)
        for factor in peers.of_others(x):
            product *= factor
        return owed * product


class Extreme(Op):
    """A minimum or a maximum: the result is one of the values."""

    def __init__(self, name: str, of_two: Callable[[Any, Any], Any]) -> None:
        self.name = self.nccl_op = name
        self.merge_op = name.capitalize()
        self.of_two = of_two
        self._is_min = name == "min"

    def neutral(self, dtype: tf.DType) -> tf.Tensor:
        largest, smallest = dtype.max, dtype.min
        if dtype.is_floating:
            largest, smallest = float("inf"), float("-inf")
        return tf.constant(largest if self._is_min else smallest, dtype)

    def gradient(
        self, owed: tf.Tensor, x: tf.Tensor, y: tf.Tensor, peers: Any
    ) -> tf.Tensor:
        """Replicas that have the same extreme share the gradient."""
        chosen = tf.cast(tf.equal(x, y), x.dtype)
        return owed * chosen / peers.total(chosen)

    def nan_bits(self, integer: tf.DType) -> int:
        """Returns an integer that is NaN, beyond all numbers."""
        return -1 if self._is_min else integer.max


SUM, MEAN, PRODUCT = _Sum(), _Mean(), _Product()
MIN, MAX = Extreme("min", tf.minimum), Extreme("max", tf.maximum)

OPS: dict[str, Op] = {op.name: op for op in (SUM, MEAN, PRODUCT, MIN, MAX)}
_SPELLINGS = {"+": "sum", "avg": "mean", "*": "product", "prod": "product"}


def find_op(op: str | Op) -> Op:
    """Returns the op that a user, or the package itself, has written."""
    if isinstance(op, Op):
        return op
    if isinstance(op, tf.distribute.ReduceOp):
        op = op.name
    name = _SPELLINGS.get(str(op).lower(), str(op).lower())
    if name not in OPS:
        raise ValueError(
            f"Unknown op {op!r}. Expected as the first argument one of "
            f"{', '.join(map(repr, OPS))} (or '+', '*', 'avg')."
        )
    return OPS[name]
