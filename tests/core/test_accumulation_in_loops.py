"""What optimizers accumulate in loops of the users is that of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from keras import layers

import keras_conflux as kc

pytestmark = several


DEVICES = min(MANY, 3)


def sgd():
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)


OPTIMIZERS = {
    "accumulating": sgd,
    "scaling losses": lambda: keras.optimizers.LossScaleOptimizer(sgd()),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # from Keras 3.15 on

    def holding():
        inner = sgd()
        return keras.optimizers.MultiOptimizer(lambda variable: inner)

    OPTIMIZERS["holding another"] = holding


def in_withdevices(apply, grads, strategy):
    @kc.withdevices
    def step():
        apply(kc.allreduce("mean", grads))

    with strategy.scope():
        step()


def in_run(apply, grads, strategy):
    strategy.run(lambda: apply([x / DEVICES for x in grads]))


def outside(apply, grads, strategy):
    apply(grads)


def in_scope(apply, grads, strategy):
    with strategy.scope():
        apply(grads)


def trained(optimizer, way=outside, devices=None, width=4, shard=None):
    """Returns what is accumulated after two of three calls, and weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((width,)), layers.Dense(width)])
    model.compile(optimizer(), "mse")
    model.optimizer.build(model.trainable_variables)
    strategy = None
    if devices:
        kc.replicate(model, devices=devices, shard=shard)
        strategy = kc.replicate(devices=devices, shard=shard)
    rng = np.random.default_rng(0)
    grads = [
        tf.constant(rng.normal(size=each.shape), tf.float32)
        for each in model.trainable_variables
    ]

    def apply(grads):
        model.optimizer.apply(grads, model.trainable_variables)

    for scale in (1.0, 2.0, 0.5):
        accumulated = [
            np.array(each)
            for each in model.optimizer.variables
            if "accumulator" in each.path
        ]
        way(apply, [scale * each for each in grads], strategy)
    return accumulated, model.get_weights()


def assert_equal(found, expected):
    assert len(found[0]) == len(found[1])
    for a, b in zip(
        [*found[0], *found[1]], [*expected[0], *expected[1]], strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [in_withdevices, in_run, outside, in_scope])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_accumulated(name, way):
    found = trained(OPTIMIZERS[name], way, DEVICES)
    assert_equal(found, trained(OPTIMIZERS[name]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [in_withdevices, outside])
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_what_is_accumulated_in_parts(way, shard):
    found = trained(sgd, way, DEVICES, 70, shard)
    assert_equal(found, trained(sgd, width=70))
