"""Writes rows of a tensor where they lie, on any device.

TensorFlow's own operation for that knows few dtypes on GPUs
(`inplace_ops_functor_gpu.cu.cc`), so rows are written as words of these.
"""

import tensorflow as tf

_WORDS = {
    tf.bfloat16: tf.float16,
    tf.float16: tf.float16,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
    tf.int64: tf.int64,
}
_BYTES = (tf.uint8, tf.int8)


def can_write(spec: tf.TensorSpec) -> bool:
    """Whether rows like these can be written in place.

    TensorFlow keeps int32 in the memory of the host, so they are not.
    """
    entries = spec.shape[1:].num_elements()
    if spec.dtype in _BYTES:
        return entries > 0 and entries % 8 == 0
    return entries > 0 and spec.dtype in _WORDS


def empty(rows: int, spec: tf.TensorSpec) -> tf.Tensor:
    """Returns so many rows like `spec`'s, of any content."""
    entries = spec.shape[1:].num_elements()
    if spec.dtype in _BYTES:
        shape, word = [rows, entries // 8], tf.int64
    else:
        shape, word = [rows, entries], _WORDS[spec.dtype]
    words = tf.raw_ops.Empty(shape=shape, dtype=word, init=False)
    return _from_words(words, spec)


def written(whole: tf.Tensor, part: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Writes rows, and returns the tensor that they were written into.

    Args:
        whole: A tensor with no other readers. It has changed afterwards.
        part: The rows.
        first: The position of the first of them.
    """
    changed = tf.raw_ops.InplaceUpdate(
        x=_words(whole), i=first + tf.range(part.shape[0]), v=_words(part)
    )
    return _from_words(changed, tf.type_spec_from_value(part))


def _words(tensor: tf.Tensor) -> tf.Tensor:
    rows = tensor.shape[0]
    if tensor.dtype in _BYTES:
        return tf.bitcast(tf.reshape(tensor, [rows, -1, 8]), tf.int64)
    flat = tf.reshape(tensor, [rows, -1])
    return tf.bitcast(flat, _WORDS[tensor.dtype])


def _from_words(words: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    shape = [words.shape[0], *spec.shape[1:]]
    return tf.reshape(tf.bitcast(words, spec.dtype), shape)
