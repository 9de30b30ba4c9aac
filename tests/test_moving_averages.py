"""Moving averages are averaged after many steps as well as after each."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from models import Keeps

import keras_conflux as kc
from keras_conflux._communication.communicator import Communicator
from keras_conflux._fit.numerics.writes import Writes
from keras_conflux._replication.steps import Step


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
    ("layer", "expected"),
    [
        (keras.layers.BatchNormalization(), 2),
        # Its moments are equal on all replicas, so nothing is averaged.
        (keras.layers.BatchNormalization(synchronized=True), 0),
        (keras.layers.BatchNormalization(renorm=True), None),
        (_keeps(_usual), 1),
        (_keeps(_turned_round), 1),
        (_keeps(_usual, "before"), 0),
        (_keeps(_usual, "after"), 0),
        (_keeps(_squares), 0),
        (_keeps(_uses_itself_twice), 0),
        (_keeps(_varies), 0),
        (_keeps(_twice), 0),
        (_keeps(_replaces), 0),
        (_keeps(_in_a_branch), 0),
    ],
)
@pytest.mark.filterwarnings("ignore:.*depends on other samples")
def test_what_is_a_moving_average(layer, expected, monkeypatch):
    found = []
    original = Writes.after_steps

    def after_steps(writes, fraction):
        found.append(len(writes._moving_averages))
        original(writes, fraction)

    monkeypatch.setattr(Writes, "after_steps", after_steps)
    model = keras.Sequential([layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kc.replicate(model, MANY)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert set(found) == {expected} or expected is None
    kc.assert_in_sync(model)


class Forward(keras.Sequential):
    """Trains by looking."""

    def train_step(self, data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        self(x, training=True)
        return {}


@pytest.mark.skipif(ON_GPU, reason="test_equal has it through XLA there")
def test_once_after_many_steps_is_as_after_each():
    def trained(steps):
        keras.utils.set_random_seed(1)
        model = Forward(
            [
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(momentum=0.5),
            ]
        )
        model.build((None, 3))
        model.compile("sgd", jit_compile=True, steps_per_execution=steps)
        kc.replicate(model, MANY)
        model.fit(x, batch_size=4 * MANY, shuffle=False, verbose=0)
        kc.assert_in_sync(model)
        return model.get_weights()

    x = np.random.default_rng(0).normal(size=(8 * 4 * MANY, 3))
    expected = trained(1)
    # A loop of steps that reduce nothing needs no XLA on CPU devices. If they
    # did reduce, this would raise.
    function = tf.function
    with (
        mock.patch.object(Communicator, "supports_xla", True),
        mock.patch.object(Step, "in_xla", False),
        mock.patch.object(
            tf,
            "function",
            lambda *args, jit_compile=None, **options: function(
                *args, **options
            ),
        ),
    ):
        got = trained(8)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
