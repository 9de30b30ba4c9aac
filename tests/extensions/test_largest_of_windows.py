"""Gradients of the largest entries of windows are TensorFlow's."""

import numpy as np
import pytest
import tensorflow as tf

from keras_conflux._extensions.kernels import largest_of_windows

PARTS = [  # rows and columns of images and windows, strides, padding
    ((7, 8), (3, 3), (2, 2), "VALID"),
    ((8, 12), (3, 3), (2, 2), "SAME"),
    ((7, 8), (2, 2), (2, 2), "VALID"),
    ((7, 9), (2, 2), (1, 1), "SAME"),
    ((5, 9), (3, 2), (1, 3), "VALID"),
    ((9, 6), (2, 4), (3, 3), "SAME"),
    ((1, 6), (1, 3), (1, 2), "SAME"),
    ((6, 6), (1, 1), (2, 2), "VALID"),
]
LEFT = [
    ((7, 7), (3, 3), (2, 2), "SAME"),  # a window starts before the start
    ((8, 8), (4, 4), (4, 4), "VALID"),  # too many entries
    ((8, 8), (2, 2), (2, 2, 2), "VALID"),  # steps over channels
]


def pooled(size, windows, strides, padding, sample):
    inputs = tf.constant(sample((2, *size, 3)), tf.float32)
    attributes = {
        "ksize": [1, *windows, 1],
        "strides": [1, *strides, 1][:4],
        "padding": padding,
    }
    outputs = tf.raw_ops.MaxPool(input=inputs, **attributes)
    upstream = np.random.default_rng(1).normal(size=outputs.shape)

    def gradient(inputs, outputs, upstream):
        return tf.raw_ops.MaxPoolGrad(
            orig_input=inputs, orig_output=outputs, grad=upstream, **attributes
        )

    return gradient, (inputs, outputs, tf.constant(upstream, tf.float32))


def distinct(shape):
    return np.random.default_rng(0).normal(size=shape)


def equal(shape):
    return np.random.default_rng(0).integers(0, 2, shape)


def infinite(shape):
    return np.where(equal(shape), -np.inf, -1e30)


@pytest.mark.parametrize("sample", [distinct, equal, infinite])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_gradients_are_those_of_tensorflow(parts, sample):
    gradient, tensors = pooled(*parts, sample)

    @tf.function(jit_compile=True, reduce_retracing=True, autograph=False)
    def replaced(*tensors):
        operation = gradient(*tensors).op
        return largest_of_windows.replacement(operation, None)[0]

    with tf.device("CPU:0"):  # on GPUs windows of -inf alone have none
        expected = gradient(*map(tf.identity, tensors))
    np.testing.assert_allclose(
        replaced(*tensors), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("parts", LEFT, ids=str)
def test_other_windows_are_left_to_xla(parts):
    gradient, tensors = pooled(*parts, distinct)
    assert not is_replaced(gradient, tensors)


def test_integers_are_left_to_xla():
    gradient, tensors = pooled(*PARTS[0], distinct)
    tensors = [tf.cast(each, tf.int32) for each in tensors]
    assert not is_replaced(gradient, tensors)


def is_replaced(gradient, tensors):
    with tf.Graph().as_default():
        found = gradient(*(tf.constant(each.numpy()) for each in tensors))
        return largest_of_windows.replacement(found.op, None) is not None
