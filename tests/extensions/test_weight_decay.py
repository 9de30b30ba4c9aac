"""Weights decay as Keras decays them, by fewer operations."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from keras import optimizers
from keras.optimizers import schedules

import keras_conflux as kc
from keras_conflux._extensions.optimizers import compat

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")


class Scale(keras.layers.Layer):
    def build(self, _):
        self.scale = self.add_weight(initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


def decaying(rate=0.01, **options):
    return lambda model: optimizers.SGD(rate, weight_decay=0.3, **options)


def excluding_some(model):
    optimizer = decaying()(model)
    optimizer.exclude_from_weight_decay([model.layers[1].kernel])
    return optimizer


def excluding_names(model):
    optimizer = decaying()(model)
    optimizer.exclude_from_weight_decay(var_names=["second", "bias"])
    return optimizer


def by_a_weight(model):
    optimizer = decaying()(model)
    optimizer.weight_decay = model.layers[2].scale
    return optimizer


def at_the_rate_of_a_weight(model):
    rate = schedules.InverseTimeDecay(0.1, 10, 0.5)
    rate.initial_learning_rate = model.layers[2].scale
    return decaying(rate)(model)


def at_a_weight(model):
    return decaying(lambda: model.layers[2].scale / 10)(model)


OPTIMIZERS = {
    "a constant rate": decaying(),
    "a schedule": decaying(schedules.CosineDecay(0.1, 20, warmup_steps=3)),
    "steps": decaying(schedules.PiecewiseConstantDecay([2], [0.1, 0.01])),
    "some excluded": excluding_some,
    "names excluded": excluding_names,
    "by a weight": by_a_weight,
    "at the rate of a weight": at_the_rate_of_a_weight,
    "at a weight": at_a_weight,
    "accumulation": decaying(gradient_accumulation_steps=2),
    "moving averages": decaying(use_ema=True, ema_overwrite_frequency=2),
    "scaled loss": lambda model: optimizers.LossScaleOptimizer(
        decaying()(model), initial_scale=8.0
    ),
    "without decay": lambda model: optimizers.SGD(0.01),
    "Muon": lambda model: optimizers.Muon(0.01, weight_decay=0.3),
}


def trained(make, devices=None, jit_compile=True, kind=keras.Sequential):
    keras.utils.set_random_seed(0)
    model = kind(
        [
            keras.Input((6,)),
            keras.layers.Dense(6, "tanh", name="first"),
            keras.layers.Dense(6, "tanh", name="second"),
            Scale(),
        ]
    )
    model.compile(make(model), "mse", jit_compile=jit_compile)
    if devices is not None:
        kc.replicate(model, kc.devices(devices))
    model.fit(X, X, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model.get_weights()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_decay_as_keras_decays_them(monkeypatch, name):
    make = OPTIMIZERS[name]
    found = trained(make, devices=1)
    for one, other in zip(trained(make), found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)
    monkeypatch.setattr(compat, "decays_at_one_rate", lambda _: False)
    expected = trained(make, devices=1)
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_layer_is_excluded_by_its_name(jit_compile):
    """Also one that was built before the model was replicated."""
    expected = trained(excluding_names, jit_compile=jit_compile)
    devices = 1 if jit_compile else MANY
    found = trained(excluding_names, devices, jit_compile)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


class Shared(keras.Sequential):
    """Gives its optimizer the weights of a layer twice."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        variables = [
            *self.trainable_variables,
            *self.layers[0].trainable_variables,
        ]
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_variables_may_be_given_twice():
    optimizer = decaying(0.1)
    expected = trained(optimizer, kind=Shared)
    found = trained(optimizer, devices=1, kind=Shared)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)


def test_a_schedule_is_asked_twice(monkeypatch):
    """Once for the decay, and once for the updates."""
    calls = []
    original = schedules.CosineDecay.__call__

    def call(schedule, step):
        calls.append(step)
        return original(schedule, step)

    monkeypatch.setattr(schedules.CosineDecay, "__call__", call)
    trained(OPTIMIZERS["a schedule"], devices=1)
    assert len(calls) == 2
