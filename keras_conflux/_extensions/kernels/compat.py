"""What kernels need of the insides of TensorFlow."""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.eager import record


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a gradient tape records what is computed of one of these."""
    return record.should_record_backprop(tensors)


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of these."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)
