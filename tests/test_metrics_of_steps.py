"""Metrics that a model has only when its first step has run."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import several
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


@pytest.mark.long
@pytest.mark.parametrize("build", [two_outputs, late])
def test_metrics_that_the_first_step_makes(count, build):
    assert_trains_as_one_device(build, count)


def assert_trains_as_one_device(build, count):
    """Compares what a model that `build` makes, with its targets, trains."""
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


class Added(keras.metrics.Metric):
    """Counts samples, from 1 on."""

    def __init__(self):
        super().__init__(name="added")
        self.total = self.add_weight(initializer="ones", name="total")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.ones_like(p[:, 0])))

    def result(self):
        return self.total + 0.0


class BuildsItsMetric(Late):
    """Makes a metric when it is built."""

    def build(self, shape):
        self.dense.build(shape)
        self.added = Added()

    def train_step(self, data):
        x, y = data
        p = self(x)  # which builds it
        self.added.update_state(y, p)
        return {"added": self.added.result()}


def _compiled_with_it():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Added()], jit_compile=False)
    return model


def _builds_it():
    model = BuildsItsMetric()
    model.compile("sgd", jit_compile=False)
    return model


@several
@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [_compiled_with_it, _builds_it])
@pytest.mark.parametrize("evaluates", [False, True])
def test_what_a_metric_begins_with(make, evaluates):
    """The reset of the first epoch comes before the metric is there."""
    found = []
    for replicate in (lambda model: None, lambda model: kc.replicate(model, 2)):
        model = make()
        replicate(model)
        logs = []
        if evaluates and make is _compiled_with_it:
            logs.append(model.evaluate(X, Y, verbose=0))
        for _ in range(2):
            history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
            logs.append(history.history["added"])
        found.append([*logs[-2:], logs[0][-1:]])
    assert found[1] == found[0]
    assert evaluates or found[1][0] == [26, 25]


class Any(keras.metrics.Metric):
    """Which of some numbers a prediction has exceeded."""

    def __init__(self):
        super().__init__(name="any")
        self.seen = self.add_variable((25,), "zeros", dtype="bool", name="seen")

    def update_state(self, y, p, sample_weight=None):
        numbers = keras.ops.linspace(-6.0, 6.0, 25)
        self.seen.assign(self.seen | keras.ops.any(p > numbers, 0))

    def result(self):
        return keras.ops.mean(keras.ops.cast(self.seen, "float32"))

    def reset_state(self):
        self.seen.assign(keras.ops.zeros_like(self.seen))


@several
@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_scope", [False, True])
def test_a_metric_whose_state_is_true_or_false(in_scope):
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Any()], jit_compile=False)
        return model

    def fit(model):
        logs = model.fit(X, Y, 8, epochs=3, shuffle=False, verbose=0)
        return model, logs

    one = fit(make())
    assert len({*one[1].history["any"]}) > 1
    if in_scope:
        with kc.replicate(devices=2).scope():
            many = fit(make())
    else:
        many = fit(kc.replicate(make(), 2))
    assert_same_training(one[0], many[0], one[1], many[1])


class Inner(keras.Model):
    """Has a metric of its own, which is none of a model around it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        y = self.dense(x)
        self.size.update_state(keras.ops.abs(y))
        return y


class Listed(keras.Model):
    """Updates metrics that its `metrics` does not have."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.seen = [keras.metrics.Mean(name="error")]
        self.seen.append(keras.metrics.AUC(name="auc"))
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean((p - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        error, auc = self.seen
        self.loss_tracker.update_state(loss)
        error.update_state(loss)
        auc.update_state(y > 0, keras.ops.sigmoid(p))
        metrics = (self.loss_tracker, error, auc, self.inner.size)
        return {each.name: each.result() for each in metrics}


def test_metrics_that_the_model_does_not_list(count):
    def build():
        model = Listed()
        model.inner.dense.build((None, 8))
        model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
        return model, Y

    assert_trains_as_one_device(build, count)


class Decaying(keras.metrics.Metric):
    """Reads its state where it adds to it."""

    def __init__(self):
        super().__init__(name="decaying")
        self.state = self.add_variable((), "zeros")

    def update_state(self, value):
        self.state.assign(0.9 * self.state + keras.ops.mean(value))

    def result(self):
        return self.state * 1.0


def test_a_metric_that_no_object_of_the_model_holds(count):
    metrics = []

    def build():
        metrics.append(metric := Decaying())

        class Outside(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x, metric=metric):
                y = self.dense(x)
                size = keras.ops.abs(y)
                metric.update_state(size)
                # The loss reads the state in the midst of the step.
                self.add_loss(0.01 * metric.result() * keras.ops.mean(size))
                return y

        model = Outside()
        model.dense.build((None, 8))
        sgd = keras.optimizers.SGD(0.01)
        model.compile(sgd, loss="mse", jit_compile=False)
        return model, Y

    assert_trains_as_one_device(build, count)
    one, other = [float(metric.result()) for metric in metrics]
    assert other == pytest.approx(one, rel=1e-5)


def test_a_metric_outside_beside_ones_that_the_first_step_builds(count):
    found = []
    for devices in (None, count):
        keras.utils.set_random_seed(1)
        outside = keras.metrics.Mean()

        class Noting(keras.Sequential):
            def train_step(self, data, outside=outside):
                logs = super().train_step(data)
                outside.update_state(logs["loss"])
                return logs

        model = Noting([keras.Input((8,)), keras.layers.Dense(1)])
        if devices:
            kc.replicate(model, devices)
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
        logs = model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history
        found.append([*logs["loss"], *logs["mae"], float(outside.result())])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


class Largest(keras.metrics.Metric):
    """Keeps a value that is no sum over samples."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros")

    def update_state(self, value):
        largest = keras.ops.maximum(self.largest, keras.ops.max(value))
        self.largest.assign(largest)

    def result(self):
        return self.largest * 1.0


def test_a_largest_value_of_a_metric_outside_of_the_model(count):
    logs, models, results = [], [], []
    for replicated in (False, True):
        keras.utils.set_random_seed(1)
        metric = Largest()

        def loss(y, p, metric=metric):
            errors = keras.ops.square(y - p)
            metric.update_state(errors)
            return errors

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        sgd = keras.optimizers.SGD(0.01)
        model.compile(sgd, loss=loss, jit_compile=False)
        if replicated:
            kc.replicate(model, count)
        options = {"batch_size": 8, "epochs": 2, "shuffle": False}
        logs.append(model.fit(X, Y, verbose=0, **options))
        models.append(model)
        results.append(float(metric.result()))
    assert_same_training(*models, *logs)
    assert results[1] == pytest.approx(results[0], rel=1e-5)
