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


def test_what_is_added_by_hand_is_what_the_optimizer_accumulates(recwarn):
    """As docs/gradient-accumulation.md adds it, in variables of the scope."""
    rng = np.random.default_rng(0)
    batches = [
        rng.normal(size=(rows, 4)).astype("float32") for rows in (8, 7, 9) * 2
    ]

    def made(devices, **options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, 0.9, **options)
        return [kc.replicate(each, devices) for each in (model, optimizer)]

    def gradients_of(model, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    model, optimizer = made(DEVICES)
    weights = model.trainable_variables
    with kc.replicate(devices=DEVICES).scope():
        sums = [
            keras.Variable(keras.ops.zeros_like(weight), trainable=False)
            for weight in weights
        ]

    @kc.withdevices
    def add(x):
        gradients = gradients_of(model, x)
        gradients = kc.allreduce("mean", gradients, weight=len(x))
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient / 3)

    @kc.withdevices(devices=DEVICES)
    def update():
        optimizer.apply([total.value for total in sums], weights)
        for total in sums:
            total.assign(keras.ops.zeros_like(total))

    one, accumulating = made(1, gradient_accumulation_steps=3)
    for number, x in enumerate(batches, start=1):
        add(kc.split(x, DEVICES))
        if number % 3 == 0:
            update()
        accumulating.apply(gradients_of(one, x), one.trainable_variables)
    assert not [x for x in recwarn if isinstance(x.message, kc.ConfluxWarning)]
    kc.assert_in_sync([model, optimizer, sums])
    assert int(optimizer.iterations) == 2
    for a, b in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


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
