"""Instance keys, by which TensorFlow matches collectives between processes.

TensorFlow keeps some 1 kB for each key that it has seen, as long as the process
lives, and processes ask the first one about a new key. So keys come back.
"""

from typing import Any

import tensorflow as tf

_IN_TURN = 4
"""How many keys take turns. No process is two collectives ahead of another."""
_SIZES = 8_388_593
"""The largest prime below 2**23, so that keys have 31 bits."""


def next_key(
    counter: tf.Variable, size: Any, dtype: tf.DType, lane: int = 0
) -> tf.Tensor:
    """Counts a collective, and returns its key.

    Collectives of one key reduce tensors of one dtype and size, as TensorFlow
    divides a tensor into chunks when it first sees the key.

    Args:
        counter: How many collectives this device has made, an int32.
        size: The number of elements of the tensor, which may be a tensor.
        dtype: Its dtype.
        lane: 1 for collectives that run between those of another counter.
    """
    turn = tf.math.floormod(counter.assign_add(1, read_value=True), _IN_TURN)
    kind = (size % _SIZES * 32 + dtype.as_datatype_enum) * 2 + lane
    return kind * _IN_TURN + turn


def size_of(tensor: tf.Tensor) -> Any:
    """Returns the number of elements, a number of Python if it is known."""
    size = tensor.shape.num_elements()
    return tf.size(tensor) if size is None else size
