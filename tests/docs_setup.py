"""What the documents take for granted: imports, a model, a loss and data."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import keras
import numpy as np
import pytest as pytest
import tensorflow as tf

import keras_conflux as kc

kc.devices(4)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x.sum(1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
loss_fn = keras.losses.MeanSquaredError()


def build_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
