"""Metrics of what a step has mixed from several samples of the batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import several
from keras import layers
from models import assert_same_training

import keras_conflux as kc

pytestmark = several
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 6)).astype("float32")
LABELS = RNG.integers(0, 4, 22)


class Mixing(keras.Model):
    """Mixes each sample with another one, and goes on with Keras' step."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Input((6,)), layers.Dense(4)])

    def call(self, x):
        return tf.nn.softmax(self.net(x))

    def mixed(self, data):
        x, y = data
        y = tf.one_hot(y, 4)
        return 0.7 * x + 0.3 * x[::-1], 0.6 * y + 0.4 * y[::-1]

    def train_step(self, data):
        return super().train_step(self.mixed(data))

    def test_step(self, data):
        return super().test_step(self.mixed(data))


class Targets(Mixing):
    """Mixes the targets alone."""

    def mixed(self, data):
        x, y = data
        y = tf.one_hot(y, 4)
        return x, 0.6 * y + 0.4 * y[::-1]


class Rounded(Mixing):
    """Makes labels of the mixture."""

    def mixed(self, data):
        x, y = super().mixed(data)
        return x, tf.round(y)


class Long(Mixing):
    """Mixes by more operations than replicas compute once more."""

    def mixed(self, data):
        x, y = super().mixed(data)
        for _ in range(310):
            x = x + 0.001
        return x, y


class Deep(Mixing):
    """Does more with its mixture than replicas would compute once more."""

    def call(self, x):
        for _ in range(310):
            x = x + 0.001
        return super().call(x)


class Weighted(Mixing):
    """Has weights that no other sample has touched."""

    def mixed(self, data):
        x, y = super().mixed(data)
        return x, y, tf.abs(data[0][:, 0])


class Unexplained(keras.metrics.R2Score):
    """The share that R2 takes from 1, before roundings of 1 hide it."""

    def result(self):
        return 1 - super().result()


METRICS = {
    "accuracy": lambda: "accuracy",
    "mae": lambda: "mae",
    "AUC": lambda: keras.metrics.AUC(name="m"),
    "Precision": lambda: keras.metrics.Precision(
        thresholds=[0.1, 0.3], name="m"
    ),
    "F1": lambda: keras.metrics.F1Score(threshold=0.3, name="m"),
    "R2": lambda: Unexplained(name="m"),
    "MeanIoU": lambda: keras.metrics.OneHotMeanIoU(4, name="m"),
    "sensitivity": lambda: keras.metrics.SensitivityAtSpecificity(
        0.5, name="m"
    ),
}


def trained(model_class, metric, count=0):
    """Returns a model, and its logs."""
    keras.utils.set_random_seed(1)
    model = model_class()
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.CategoricalCrossentropy(),
        weighted_metrics=[METRICS[metric]()],
        jit_compile=False,
    )
    if count:
        kc.replicate(model, devices=DEVICES[:count])
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(8)
    return model, model.fit(data, epochs=2, verbose=0, validation_data=data)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "model_class", [Mixing, Targets, Rounded, Weighted, Deep]
)
def test_metrics_are_those_of_one_device(model_class, metric):
    one, expected = trained(model_class, metric)
    many, got = trained(model_class, metric, MANY)
    assert_same_training(one, many, expected, got)


@pytest.mark.filterwarnings("ignore:.*the loss of shape")
def test_metrics_that_cannot_be_those_of_one_device_warn():
    with (
        pytest.warns(kc.ConfluxWarning, match="input of the metric 'loss'"),
        pytest.warns(kc.ConfluxWarning, match="the metric 'm' gets rows"),
    ):
        trained(Long, "AUC", 2)
