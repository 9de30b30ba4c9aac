"""Moving averages are one device's after each step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from models import Keeps
from models import assert_same_training

import keras_conflux as kc


def _keeps(update, look=None):
    return Keeps(
        lambda kept, x: update(kept, keras.ops.mean(x, axis=0)), look=look
    )


def _usual(kept, mean):
    kept.assign(kept * 0.9 + mean * 0.1)


def _turned_round(kept, mean):
    kept.assign(0.1 * mean + 0.9 * kept)


def _squares(kept, mean):
    kept.assign(kept * kept + mean)


def _uses_itself_twice(kept, mean):
    kept.assign(kept * 0.9 + kept * mean)


def _varies(kept, mean):
    kept.assign(kept * mean + mean)


def _twice(kept, mean):
    kept.assign(kept * 0.9 + mean * 0.1)
    kept.assign(kept * 0.9 + mean * 0.1)


def _replaces(kept, mean):
    kept.assign(mean)


def _in_a_branch(kept, mean):
    tf.cond(
        tf.reduce_sum(kept) > -1e9,  # as on all replicas
        lambda: kept.assign(kept * 0.9 + mean * 0.1),
        lambda: kept.assign(kept * 0.9),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.BatchNormalization(synchronized=True),
        lambda: _keeps(_usual),
        lambda: _keeps(_turned_round),
        lambda: _keeps(_usual, "before"),
        lambda: _keeps(_usual, "after"),
        lambda: _keeps(_squares),
        lambda: _keeps(_uses_itself_twice),
        lambda: _keeps(_varies),
        lambda: _keeps(_twice),
        lambda: _keeps(_replaces),
        lambda: _keeps(_in_a_branch),
    ],
)
@pytest.mark.filterwarnings("ignore:.*depends on other samples")
def test_a_layer_that_keeps_a_mean(layer):
    def trained(count):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layer(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        if count:
            kc.replicate(model, count)
        model.fit(x, x[:, :1], batch_size=5, shuffle=False, verbose=0)
        return model

    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    many = trained(MANY)
    kc.assert_in_sync(many)
    assert_same_training(trained(None), many)


@several
def test_statistics_of_a_replicas_own_samples_are_averaged():
    layer = keras.layers.BatchNormalization()
    renormalizing = keras.layers.BatchNormalization(renorm=True)
    inside = [layer, renormalizing, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *inside])
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, 2)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    model.fit(x, x[:, :1], batch_size=5, shuffle=False, verbose=0)
    kc.assert_in_sync(model)
    mean, variance = (
        np.average([f(x[:3], axis=0), f(x[3:], axis=0)], 0, [3, 2])
        for f in (np.mean, np.var)
    )
    np.testing.assert_allclose(layer.moving_mean, 0.01 * mean, rtol=1e-5)
    np.testing.assert_allclose(
        layer.moving_variance, 0.99 + 0.01 * variance, rtol=1e-5
    )
