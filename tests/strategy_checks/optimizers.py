"""Optimizers of TensorFlow 1 and of Keras, called in replicas."""

import keras
import tensorflow as tf

from strategy_checks.programs import batches
from strategy_checks.programs import context
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import rows
from strategy_checks.programs import variable
from strategy_checks.table import MEETING
from strategy_checks.table import check

v1 = tf.compat.v1.train

OF_VERSION_1 = {
    "gradient_descent": lambda: v1.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.AdamOptimizer(0.1),
}


def add_version_1(name):
    @check(f"{name}_of_version_1")
    def trains(strategy):
        zero = variable(strategy, 0.0)
        weight = variable(strategy, [[0.3], [0.1]])
        with strategy.scope():
            optimizer = OF_VERSION_1[name]()

        def program():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(
                    (weight + zero - 1.0) ** 2 * (number() + 1.0)
                )
            variables = [weight, zero]
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        step = tf.function(lambda: strategy.run(program))
        for _ in range(3):
            step()
        return weight, zero


for _name in OF_VERSION_1:
    add_version_1(_name)


@check()
def version_1_trains_eagerly(strategy):
    weight = variable(strategy, 0.3)
    with strategy.scope():
        optimizer = v1.GradientDescentOptimizer(0.1)

    def program():
        with tf.GradientTape() as tape:
            loss = weight * weight * number()
        gradient = tape.gradient(loss, weight)
        optimizer.apply_gradients([(gradient, weight)])

    strategy.run(program)
    return weight


@check()
def version_1_minimizes(strategy):
    weight = variable(strategy, 0.3)
    with strategy.scope():
        optimizer = v1.MomentumOptimizer(0.1, 0.9)
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    del step

    def program():
        optimizer.minimize(lambda: weight * weight * (number() + 1.0))

    in_function(strategy, program)
    return weight, optimizer.get_slot_names()


@check()
def version_1_takes_sparse_gradients(strategy):
    weight = variable(strategy, [[1.0], [2.0], [3.0]])
    with strategy.scope():
        optimizer = v1.GradientDescentOptimizer(0.1)

    def program():
        index = context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(weight, [index, 0]) ** 2)
        gradient = tape.gradient(loss, weight)
        optimizer.apply_gradients([(gradient, weight)])

    in_function(strategy, program)
    return weight


OF_KERAS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "moving_average": lambda: keras.optimizers.SGD(0.1, use_ema=True),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
}


def trained(strategy, optimizer, steps=3, gradient=None):
    """A weight, its optimizer's count and state after steps of replicas."""
    with strategy.scope():
        weight = keras.Variable([0.3, 0.1])
        optimizer = optimizer()
        optimizer.build([weight])

    def program():
        if gradient is not None:
            optimizer.apply([gradient * (number() + 1.0)], [weight])
            return
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weight.value - 1.0) ** 2) * (number() + 1)
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])

    step = tf.function(lambda: strategy.run(program))
    for _ in range(steps):
        step()
    return weight.value, optimizer.iterations


def add_keras(name):
    @check(f"{name}_of_keras")
    def trains(strategy):
        return trained(strategy, OF_KERAS[name])


for _name in OF_KERAS:
    add_keras(_name)


def add_clipping(name, here):
    @check(f"{name}_of_keras", differs="the sum is clipped", here=here)
    def clips(strategy):
        optimizer = lambda: keras.optimizers.SGD(1.0, **{name: 1.0})  # noqa: E731
        return trained(strategy, optimizer, 1, tf.constant([3.0, 4.0]))[0]


for _name, _here in {
    "clipnorm": [-0.3, -0.7],
    "clipvalue": [-0.7, -0.9],
    "global_clipnorm": [-0.3, -0.7],
}.items():
    add_clipping(_name, [_here] * 3)


@check()
def a_scaled_loss_of_keras(strategy):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=4.0
        )

    return trained(strategy, optimizer, 2, tf.constant([4.0, 8.0]))


@check(
    raises=RuntimeError,
    differs=MEETING,
    here=[[-35.7, -47.9]] * 3,
)
def accumulation_of_keras(strategy):
    def optimizer():
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)

    return trained(strategy, optimizer, 4, tf.constant([3.0, 4.0]))[0]


@check()
def eager_replicas_apply_an_optimizer_of_keras(strategy):
    with strategy.scope():
        weight = keras.Variable([0.3, 0.1])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])
    gradient = tf.constant([3.0, 4.0])
    strategy.run(lambda: optimizer.apply([gradient * number()], [weight]))
    return weight.value, optimizer.iterations.value


@check(
    raises=RuntimeError,
    differs=MEETING,
    here=[[-0.6, -1.1]] * 3,
)
def a_condition_around_an_optimizer_of_keras(strategy):
    with strategy.scope():
        weight = keras.Variable([0.3, 0.1])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    def apply():
        optimizer.apply([tf.constant([3.0, 4.0]) * number()], [weight])

    def program(flag):
        tf.cond(flag, apply, lambda: None)

    step = tf.function(lambda flag: strategy.run(program, args=(flag,)))
    step(tf.constant(True))
    step(tf.constant(False))
    return weight.value


@check()
def an_optimizer_in_a_loop_over_steps(strategy):
    with strategy.scope():
        weight = keras.Variable([0.3, 0.1])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([weight])

    def program(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight.value * x)
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])

    @tf.function
    def run(iterator):
        for _ in tf.range(3):
            strategy.run(program, args=(next(iterator),))

    run(iter(batches(strategy, rows(18)[:, None], 6)))
    return weight.value, optimizer.iterations.value


@check(
    raises=AttributeError,
    differs="an optimizer of Keras is called outside of replicas",
    here=[[-0.6, -1.1]] * 3,
)
def gradients_are_reduced_before_an_optimizer_of_keras(strategy):
    with strategy.scope():
        weight = keras.Variable([0.3, 0.1])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])
    found = strategy.run(lambda: tf.constant([3.0, 4.0]) * number())
    gradient = strategy.reduce("SUM", found, axis=None)
    with strategy.scope():
        optimizer.apply([gradient], [weight])
    return weight.value


@check()
def a_sparse_gradient_of_keras(strategy):
    with strategy.scope():
        weight = keras.Variable([[1.0], [2.0], [3.0]])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([weight])

    def program():
        index = context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(weight.value, [index, 0]) ** 2)
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])

    in_function(strategy, program)
    return weight.value


@check()
def an_optimizer_of_keras_builds_itself(strategy):
    with strategy.scope():
        weight = keras.Variable([0.3, 0.1])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    @tf.function
    def step():
        strategy.run(
            lambda: optimizer.apply([tf.constant([3.0, 4.0])], [weight])
        )

    step()
    step()
    return weight


@check()
def version_1_counts_steps(strategy):
    weight = variable(strategy, 0.3)
    with strategy.scope():
        optimizer = v1.MomentumOptimizer(0.1, 0.9)
        steps = tf.Variable(
            0,
            dtype=tf.int64,
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def program():
        gradient = weight * (number() + 1.0)
        optimizer.apply_gradients([(gradient, weight)], global_step=steps)

    step = tf.function(lambda: strategy.run(program))
    step()
    step()
    return weight, steps, optimizer.get_slot(weight, "momentum")
