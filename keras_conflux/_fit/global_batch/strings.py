"""Strings as numbers, which collectives can carry, and back."""

import tensorflow as tf

from keras_conflux._replication.strategy import replica_collectives


def encoded(strings: tf.Tensor) -> tf.Tensor:
    """Returns the bytes and the length of each string, along a new last axis.

    All replicas call it together, as the longest string of all sets the size.
    """
    lengths = tf.strings.length(strings)
    longest = tf.maximum(tf.reduce_max(lengths), 1)
    width = replica_collectives().all_reduce("max", [longest])[0]
    codes = tf.io.decode_raw(strings, tf.uint8, fixed_length=width)
    codes = tf.cast(codes, lengths.dtype)
    return tf.concat([codes, lengths[..., tf.newaxis]], -1)


def decoded(codes: tf.Tensor) -> tf.Tensor:
    """Returns the strings that were encoded."""
    characters = tf.constant([bytes([code]) for code in range(256)])
    width = tf.shape(codes)[-1] - 1
    bytes_of_each, lengths = tf.split(codes, [width, 1], -1)
    lengths = tf.squeeze(lengths, -1)
    padded = tf.strings.reduce_join(tf.gather(characters, bytes_of_each), -1)
    return tf.strings.substr(padded, tf.zeros_like(lengths), lengths)
