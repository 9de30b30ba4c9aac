"""Draws from data sets without an error at their end."""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure


def next_of(iterator: Any) -> Any:
    """Returns the next element, as `next` would.

    The end of a `tf.data.Dataset` is an error to TensorFlow, and on GPUs
    operations of other threads may get it, too: see the notes. Here TensorFlow
    tells the end by an empty optional.

    Raises:
        StopIteration: At the end.
    """
    if not isinstance(iterator, tf.data.Iterator):
        return next(iterator)
    source: Any = iterator
    tensors = {
        "output_types": source._flat_output_types,
        "output_shapes": source._flat_output_shapes,
    }
    with tf.device(source._iterator_resource.device):
        found = tf.raw_ops.IteratorGetNextAsOptional(
            iterator=source._iterator_resource, **tensors
        )
        if not tf.raw_ops.OptionalHasValue(optional=found):
            raise StopIteration
        leaves = tf.raw_ops.OptionalGetValue(optional=found, **tensors)
        spec = source.element_spec
        return structure.from_compatible_tensor_list(spec, leaves)
