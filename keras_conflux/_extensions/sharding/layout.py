"""How a tensor is cut into parts of one size, and made whole again."""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from keras_conflux._common.trees import length


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tensor that lies flat, filled up and cut into equal parts."""

    shape: tuple[int, ...]
    """The shape of the whole."""
    count: int
    """The number of parts."""

    @property
    def size(self) -> int:
        """The number of entries of the whole."""
        return math.prod(self.shape)

    @property
    def part_size(self) -> int:
        """The number of entries of a part."""
        return -(-self.size // self.count)

    def flat(self, tensor: Any) -> tf.Tensor:
        """Returns a whole tensor with one axis, filled up with zeros."""
        flat = tf.reshape(tensor, [self.size])
        missing = self.part_size * self.count - self.size
        return tf.pad(flat, [[0, missing]]) if missing else flat

    def whole(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns the tensor of which all parts are joined."""
        if self.part_size * self.count > self.size:
            flat = flat[: self.size]
        return tf.reshape(flat, self.shape)

    def part_of(self, tensor: Any, rank: Any) -> tf.Tensor:
        """Returns one part of a whole; its rank may be a scalar tensor."""
        begin = rank * self.part_size
        if not isinstance(rank, int):
            return tf.slice(self.flat(tensor), [begin], [self.part_size])
        # No copy of the whole: only this part is filled up.
        flat = tf.reshape(tensor, [self.size])
        part = flat[begin : begin + self.part_size]
        missing = self.part_size - length(part)
        return tf.pad(part, [[0, missing]]) if missing else part

    def parts(self, tensor: Any) -> list[tf.Tensor]:
        """Returns all parts of a whole tensor."""
        return tf.split(self.flat(tensor), self.count)

    def is_part(self, tensor: Any) -> bool:
        """Whether a tensor has the shape of a part."""
        return tuple(tensor.shape) == (self.part_size,)

    def own_part(self, tensor: Any, rank: Any) -> tf.Tensor:
        """Returns a part of a tensor that may be the whole, or that part."""
        return tensor if self.is_part(tensor) else self.part_of(tensor, rank)
