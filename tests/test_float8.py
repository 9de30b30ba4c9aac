"""Layers in float8, whose scales Keras computes as gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from models import COMPILED
from models import assert_same_training

import keras_conflux as kc

RNG = np.random.default_rng(0)
X = RNG.normal(size=(25, 8)).astype("float32")
Y = X.sum(1, keepdims=True)


def model_of(optimizer="sgd"):
    keras.utils.set_random_seed(1)
    layers = keras.layers.Dense(16, "relu"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.quantize("float8")
    model.compile(optimizer, "mse", jit_compile=COMPILED)
    return model


def test_scales_are_those_of_one_device(count):
    one, many = model_of(), kc.replicate(model_of(), count)
    # The last batch has one sample, so that some replicas have none.
    options = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0}
    logs = [model.fit(X, Y, **options) for model in (one, many)]
    # Keras rounds the gradient of a bias to bfloat16, on each replica.
    assert_same_training(one, many, *logs, rtol=2e-2)
    kc.assert_in_sync(many)
    for expected, got in zip(one.variables, many.variables, strict=True):
        if expected.path.endswith(("scale", "history")):
            np.testing.assert_allclose(got, expected, rtol=1e-3)


def test_accumulated_gradients_are_refused():
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    model = kc.replicate(model_of(optimizer), MANY)
    with pytest.raises(NotImplementedError, match="without accumulation"):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_loops_of_ones_own_are_refused():
    model = kc.replicate(model_of(), MANY)

    @kc.withdevices(devices=MANY)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = kc.allreduce("mean", gradients)
        model.optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(NotImplementedError, match="a loop of your own"):
        step(X, Y)


@pytest.mark.parametrize("accumulation", [None, 2])
def test_one_replica_does_what_keras_does(accumulation):
    def build():
        return model_of(
            keras.optimizers.SGD(0.01, gradient_accumulation_steps=accumulation)
        )

    one, many = build(), kc.replicate(build(), 1)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    logs = [model.fit(X, Y, **options) for model in (one, many)]
    assert_same_training(one, many, *logs)
