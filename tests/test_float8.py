"""Layers in float8, whose scales Keras computes as gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from models import COMPILED
from models import assert_same_outcome
from models import gaps
from models import moved_by_roundings
from models import outcome

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


def assert_same(many, build, epochs, rtol=1e-5):
    """Trains on one device as well, and compares all variables and logs.

    A rounding can move a number to the next of float8, a sixteenth away. What
    is not compiled, as the last batch of replicas, rounds other numbers to
    float8 than what is: they may differ as those of Keras alone do.
    """

    def fit(model):
        # The last batch has one sample, so that some replicas have none.
        logs = model.fit(X, Y, 8, epochs, shuffle=False, verbose=0)
        return outcome(model, logs)

    def train(prepare=lambda model: None):
        one = build()
        prepare(one)
        return fit(one)

    def roundings():
        moved = moved_by_roundings(expected, train)
        graph = train(lambda one: setattr(one, "jit_compile", False))
        without_xla = gaps(expected, graph)
        return {name: max(moved[name], without_xla[name]) for name in moved}

    got, expected = fit(many), train()
    assert_same_outcome(expected, got, rtol, roundings)
    return expected, got


def fit_as_replicas(model, epochs):
    """Trains with XLA, but for the last batch of an epoch.

    Replicas leave a batch that does not divide as others do to TensorFlow,
    which rounds other numbers to float8.
    """
    losses = []
    for _ in range(epochs):
        parts = []
        for rows, jit_compile in (
            (slice(24), COMPILED),
            (slice(24, 25), False),
        ):
            model.jit_compile, model.train_function = jit_compile, None
            logs = model.fit(X[rows], Y[rows], 8, shuffle=False, verbose=0)
            parts.append(logs.history["loss"][0])
        losses.append(np.average(parts, weights=[24, 1]))
    logs.history["loss"] = losses
    return outcome(model, logs)


@pytest.mark.sampled(3)
def test_scales_are_those_of_one_device(count):
    many = kc.replicate(model_of(), count)
    # Keras rounds the gradient of a bias to bfloat16, on each replica.
    expected, got = assert_same(many, model_of, epochs=4, rtol=2e-2)
    kc.assert_in_sync(many)
    scales = [x for x in expected if x.endswith(("scale", "history"))]
    assert len(scales) == 12
    for (name, one), other in zip(expected.items(), got.values(), strict=True):
        # XLA rounds other numbers to float8 in each of its programs.
        if name in scales and not COMPILED:
            np.testing.assert_allclose(other, one, rtol=1e-3, err_msg=name)


@several
def test_accumulated_gradients_are_refused():
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    model = kc.replicate(model_of(optimizer), MANY)
    with pytest.raises(NotImplementedError, match="without accumulation"):
        model.fit(X, Y, batch_size=8, verbose=0)


@several
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
        step(kc.replicate(X, MANY), kc.replicate(Y, MANY))


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulation", [None, 2])
def test_one_replica_does_what_keras_does(accumulation):
    def trained(prepare=lambda model: None, count=None):
        optimizer = keras.optimizers.SGD(
            0.01, gradient_accumulation_steps=accumulation
        )
        model = model_of(optimizer)
        prepare(model)
        if count is None:
            return fit_as_replicas(model, epochs=2)
        kc.replicate(model, count)
        logs = model.fit(X, Y, 8, 2, shuffle=False, verbose=0)
        return outcome(model, logs)

    expected = trained()
    assert_same_outcome(
        expected,
        trained(count=1),
        roundings=lambda: moved_by_roundings(expected, trained),
    )
