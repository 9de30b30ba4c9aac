"""Metrics that a model has only when its first step has run."""

import keras
import pytest
import tensorflow as tf
from models import assert_same_training
from models import regression

import keras_conflux as kc

X, Y = regression(25)


class Own(keras.Model):
    """Has a step of its own, so that Keras builds losses within the step."""

    def train_step(self, data):
        return super().train_step(data)


def two_outputs():
    inputs = keras.Input((8,))
    outputs = {name: keras.layers.Dense(1)(inputs) for name in "ab"}
    model = Own(inputs, outputs)
    model.compile("sgd", loss={"a": "mse", "b": "mse"}, jit_compile=False)
    return model, {"a": Y, "b": -Y}


class Late(keras.Model):
    """Makes metrics when it first needs them."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = (self(x) - y) ** 2
            loss = tf.reduce_mean(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for name, value in (("loss", loss), ("largest", tf.reduce_max(errors))):
            if name not in self.metrics_names:
                self._metrics.append(keras.metrics.Mean(name=name))
            metric = self.metrics[self.metrics_names.index(name)]
            metric.update_state(value, sample_weight=tf.shape(x)[0])
        return {each.name: each.result() for each in self.metrics}


def late():
    model = Late()
    model.dense.build((None, 8))
    model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    return model, Y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [two_outputs, late])
def test_metrics_that_the_first_step_makes(count, build):
    logs = []
    models = []
    for replicated in (False, True):
        keras.utils.set_random_seed(1)
        model, y = build()
        if replicated:
            kc.replicate(model, count)
        options = {"batch_size": 8, "epochs": 2, "shuffle": False}
        logs.append(model.fit(X, y, verbose=0, **options))
        models.append(model)
    assert_same_training(*models, *logs)
