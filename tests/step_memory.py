"""Steps in which weights and activations take memory, and what is expected."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import keras_conflux as kc

WAYS = ((None, None), ("weights", None), ("weights", "full"))
"""`shard`, and the mode of a `keras.RematScope`."""


class Block(layers.Layer):
    """Of which little is kept in a `keras.RematScope`: its input alone."""

    def __init__(self, width):
        super().__init__()
        self.inside = layers.Dense(4 * width, activation="gelu")
        self.outside = layers.Dense(width)

    def build(self, shape):
        self.inside.build(shape)
        self.outside.build((*shape[:-1], self.inside.units))

    def call(self, x):
        return x + self.outside(self.inside(x))


def blocks(width, mode=None):
    """Returns a model whose activations of `samples` are twice its weights.

    Args:
        width: Of its input and output.
        mode: Of a `keras.RematScope`.
    """
    with keras.RematScope(mode):
        inner = [Block(width) for _ in range(8)]
    model = keras.Sequential([layers.Input((width,)), *inner])
    model.compile("adam", "mse", jit_compile=True)
    return model


def samples(width):
    """Returns how many samples each of two devices gets."""
    return 2 * width


def told(width):
    """Returns what `kc.memory` tells, without recomputation and with it."""
    batch = (tf.TensorSpec([2 * samples(width), width]),) * 2
    return [
        kc.memory(blocks(width, mode), batch, devices=2).with_shard(None)
        for mode in (None, "full")
    ]


def assert_as_told(peaks, told):
    """Compares the most that steps have in memory with what was told.

    With weights in parts, XLA decides how many are gathered and how many
    gradients are whole at a time. So numbers are rough.

    Args:
        peaks: In bytes on each device, for each of `WAYS`.
        told: By `told`.
    """
    copies, parts, again = peaks
    plain, recomputed = told
    cut = plain.with_shard("weights").variables
    for found, wanted in (
        (copies - plain.variables, plain.step),
        (copies - parts, plain.variables - cut),
        (parts - again, plain.step - recomputed.step),
    ):
        assert found == pytest.approx(wanted, rel=0.4), (peaks, told)
    assert again > cut
