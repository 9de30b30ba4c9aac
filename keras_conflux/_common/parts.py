"""The length of tensors of one axis."""

import tensorflow as tf


def length(flat: tf.Tensor) -> int:
    """Returns the number of entries of a tensor of one axis."""
    found = flat.shape[0]
    assert found is not None, "parts are of known sizes"
    return found
