"""Cross entropies that read the logit of a label, and not all logits again.

XLA adds up a row of products with zeros and a one. In a language model that is
a pass over the largest tensor of a step, for one number of each row. And it
may keep the exponentials of all logits for the gradient, in float32.
"""

import tensorflow as tf

from keras_conflux._compat import tensorflow_xla
from keras_conflux._extensions.kernels.compiled_shapes import ShapeOf


def replacement(
    operation: tf.Operation, shape_of: ShapeOf
) -> list[tf.Tensor] | None:
    """Returns the same losses, but for roundings, and the same gradients."""
    logits, labels = operation.inputs
    if logits.dtype != tf.float32:
        return None  # XLA would round otherwise
    # Whoever differentiates this gets the derivatives of the losses.
    largest = tf.stop_gradient(tf.reduce_max(logits, 1, keepdims=True))
    shifted = logits - largest
    total = tf.reduce_sum(tf.exp(shifted), 1, keepdims=True)
    losses = tf.math.log(total[:, 0]) - tf.gather(shifted, labels, batch_dims=1)
    if shape_of(logits).is_fully_defined():
        # To XLA, the exponentials of the gradient are others.
        largest = tf.stop_gradient(tensorflow_xla.barrier(largest))
    classes = tf.range(tf.shape(logits, labels.dtype)[1])
    is_label = tf.cast(tf.equal(labels[:, None], classes), logits.dtype)
    gradients = tf.exp(logits - largest) / total - is_label
    is_class = (labels >= 0) & (labels < tf.size(classes, labels.dtype))
    return [
        tf.where(is_class, losses, float("nan")),
        tf.where(is_class[:, None], gradients, float("nan")),
    ]
