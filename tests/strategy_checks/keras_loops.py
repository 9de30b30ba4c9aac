"""Loops with models, losses and metrics of Keras."""

import keras
import numpy as np
import tensorflow as tf

from strategy_checks.programs import batches
from strategy_checks.programs import each
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.table import check


def samples(count):
    x = np.random.default_rng(0).normal(size=(count, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def dense_model():
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def values_of(model):
    return [weight.value for weight in model.weights]


@check()
def the_loop_of_the_tutorial(strategy):
    with strategy.scope():
        model, optimizer = dense_model(), keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.MeanSquaredError(reduction=None)
        mean = keras.metrics.Mean()

    def program(x, y):
        with tf.GradientTape() as tape:
            per_sample = loss_of(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(per_sample, global_batch_size=6)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(per_sample)
        return loss

    @tf.function
    def step(batch):
        found = strategy.run(program, args=batch)
        return strategy.reduce("SUM", found, axis=None)

    losses = []
    for batch in batches(strategy, samples(12), 6):
        losses.append(step(batch))
    losses.append(mean.result())
    mean.reset_state()
    return losses, values_of(model), optimizer.iterations.value


@check()
def metrics_in_a_loop(strategy):
    with strategy.scope():
        mean = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        area = keras.metrics.AUC(num_thresholds=5)

    def program(x):
        mean.update_state(x)
        accuracy.update_state(x % 2.0, tf.one_hot(tf.cast(x, tf.int32) % 3, 3))
        area.update_state(x % 2.0, x / 10.0)

    step = tf.function(lambda x: strategy.run(program, args=(x,)))
    found = []
    for _ in range(2):
        for start in (0.0, 3.0):
            step(each(strategy, lambda index, s=start: tf.fill([2], index + s)))
        for metric in (mean, accuracy, area):
            found.append(metric.result())
            metric.reset_state()
    return found


@check()
def a_metric_outside_of_replicas(strategy):
    with strategy.scope():
        metric = keras.metrics.MeanSquaredError()
    metric.update_state([1.0, 2.0], [2.0, 4.0])
    return metric.result(), [weight.numpy() for weight in metric.variables]


@check()
def a_model_is_called_outside_of_replicas(strategy):
    with strategy.scope():
        model = dense_model()
    x = samples(4)[0]
    return model(x), tf.function(model)(x), model.count_params()


@check()
def a_layer_is_built_in_replicas(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(2, kernel_initializer="ones")
        layer.build((None, 3))
    x = each(strategy, lambda index: tf.ones([2, 3]) * float(index))
    return in_function(strategy, layer, x), layer.kernel.value


@check()
def a_layer_with_a_count_of_its_own(strategy):
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(
                shape=(),
                initializer="zeros",
                trainable=False,
                aggregation="only_first_replica",
            )

        def call(self, x):
            self.count.assign_add(1.0)
            return x

    with strategy.scope():
        layer = Counting()
        layer.build((None,))
    in_function(strategy, layer, numbers(strategy))
    return layer.count.value


@check()
def variables_of_keras_by_aggregation(strategy):
    found = {}
    for name in ("none", "sum", "mean", "only_first_replica"):
        with strategy.scope():
            made = keras.Variable(1.0, aggregation=name, trainable=False)
        in_function(strategy, lambda made=made: made.assign(number() + 1.0))
        found[name] = made.value, made.aggregation
    return found


@check()
def a_variable_of_keras_on_read(strategy):
    with strategy.scope():
        made = keras.Variable(
            0.0, aggregation="sum", synchronization="on_read", trainable=False
        )
    in_function(strategy, lambda: made.assign_add(number() + 1.0))
    return made.numpy(), made.synchronization


@check()
def normalization_by_batches(strategy):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 3))
    x = each(strategy, lambda index: tf.ones([2, 3]) * [[1.0], [index]])
    found = in_function(strategy, lambda x: layer(x, training=True), x)
    return found, layer.moving_mean.value, layer.moving_variance.value


@check()
def mixed_precision_in_a_loop(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
        layer.build((None, 3))
    x = each(strategy, lambda index: tf.ones([2, 3]) * float(index))
    found = in_function(strategy, lambda x: tf.cast(layer(x), tf.float32), x)
    return found, [weight.dtype for weight in layer.weights]


@check()
def frozen_layers_in_a_loop(strategy):
    with strategy.scope():
        model, optimizer = dense_model(), keras.optimizers.SGD(0.1)
        model.layers[0].trainable = False
        optimizer.build(model.trainable_variables)

    def program(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / 6.0
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    x = each(strategy, lambda index: tf.ones([2, 3]) * float(index))
    in_function(strategy, program, x, tf.ones([2, 1]))
    return values_of(model)


@check()
def two_models_against_each_other(strategy):
    def build(inputs):
        model = keras.Sequential(
            [keras.Input((inputs,)), keras.layers.Dense(3)]
        )
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    with strategy.scope():
        maker, first = build(2)
        judge, second = build(3)

    def program(x):
        noise = tf.random.stateless_normal([2, 2], [1, 2])
        with tf.GradientTape(persistent=True) as tape:
            made = maker(noise)
            good = tf.reduce_sum(judge(x) - judge(made)) / 6.0
            bad = tf.reduce_sum(judge(made) ** 2) / 6.0
        for loss, model, optimizer in (
            (good, judge, second),
            (bad, maker, first),
        ):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        return good, bad

    x = each(strategy, lambda index: tf.ones([2, 3]) * float(index))
    found = in_function(strategy, program, x)
    return found, values_of(maker), values_of(judge)


def compiled(strategy):
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "mse", metrics=["mae"])
    return model


@check()
def a_model_predicts(strategy):
    return compiled(strategy).predict(samples(12)[0], batch_size=6, verbose=0)


@check()
def a_distributed_data_set_is_fitted(strategy):
    model = compiled(strategy)
    history = model.fit(batches(strategy, samples(12), 6), verbose=0)
    return history.history, model.get_weights()


@check()
def a_layer_builds_itself_in_replicas(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(2, kernel_initializer="ones")
    x = each(strategy, lambda index: tf.ones([2, 3]) * float(index))
    return in_function(strategy, layer, x), layer.kernel


@check()
def replicas_call_a_model(strategy):
    with strategy.scope():
        model = dense_model()
    x = each(strategy, lambda index: tf.ones([2, 3]) * float(index))
    return strategy.run(model, args=(x,), kwargs={"training": True})


@check()
def normalization_by_all_replicas(strategy):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
        layer.build((None, 3))
    x = each(strategy, lambda index: tf.ones([2, 3]) * [[1.0], [index]])
    found = in_function(strategy, lambda x: layer(x, training=True), x)
    return found, layer.moving_mean, layer.moving_variance
