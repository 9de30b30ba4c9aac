"""Checkpoints and saved models of what was made in a scope."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

from strategy_checks.programs import AGGREGATIONS
from strategy_checks.programs import FIRST
from strategy_checks.programs import MEAN
from strategy_checks.programs import SUM
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import on_read
from strategy_checks.programs import variable
from strategy_checks.table import check


def place():
    return os.path.join(tempfile.mkdtemp(), "saved")


@check()
def a_checkpoint_of_equal_copies(strategy):
    found = {}
    for name, aggregation in AGGREGATIONS.items():
        made = variable(strategy, 2.0, aggregation=aggregation)
        checkpoint = tf.train.Checkpoint(v=made)
        path = checkpoint.save(place())
        plain = tf.Variable(0.0)
        tf.train.Checkpoint(v=plain).restore(path).assert_consumed()
        made.assign(5.0)
        checkpoint.restore(path).assert_consumed()
        found[name] = plain, made
    return found


@check()
def a_checkpoint_of_one_device(strategy):
    path = tf.train.Checkpoint(v=tf.Variable(3.0)).save(place())
    made = variable(strategy, 0.0, aggregation=MEAN)
    tf.train.Checkpoint(v=made).restore(path)
    return made


@check()
def a_checkpoint_of_copies_that_differ(strategy):
    found = {}
    for name in ("sum", "mean", "first"):
        made = on_read(strategy, 0.0, AGGREGATIONS[name])
        in_function(strategy, lambda made=made: made.assign_add(number() + 1))
        checkpoint = tf.train.Checkpoint(v=made)
        path = checkpoint.write(place())
        plain = tf.Variable(0.0)
        tf.train.Checkpoint(v=plain).read(path)
        made.assign(5.0)
        checkpoint.read(path)
        found[name] = plain, made.read_value()
    return found


@check()
def a_checkpoint_of_one_device_into_a_sum(strategy):
    path = tf.train.Checkpoint(v=tf.Variable(6.0)).save(place())
    made = on_read(strategy, 0.0, SUM)
    tf.train.Checkpoint(v=made).restore(path)
    return made.read_value()


@check()
def a_checkpoint_that_is_read_before_the_variable_is_made(strategy):
    path = tf.train.Checkpoint(v=variable(strategy, 3.0)).save(place())
    checkpoint = tf.train.Checkpoint()
    checkpoint.restore(path)
    checkpoint.v = variable(strategy, 0.0)
    return checkpoint.v


@check()
def a_manager_of_checkpoints(strategy):
    made = variable(strategy, 0, aggregation=FIRST)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(v=made), tempfile.mkdtemp(), max_to_keep=2
    )
    for _ in range(3):
        in_function(strategy, lambda: made.assign_add(1))
        manager.save()
    made.assign(0)
    manager.restore_or_initialize()
    return made, len(manager.checkpoints)


@check()
def a_checkpoint_of_a_training(strategy):
    def build():
        with strategy.scope():
            weight = keras.Variable([0.3, 0.1])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build([weight])
        return weight, optimizer

    def step(weight, optimizer):
        gradient = tf.constant([3.0, 4.0])
        in_function(
            strategy,
            lambda: optimizer.apply([gradient * number()], [weight]),
        )

    weight, optimizer = build()
    step(weight, optimizer)
    saved = tf.train.Checkpoint(w=weight.value, o=optimizer).save(place())
    step(weight, optimizer)
    other, second = build()
    tf.train.Checkpoint(w=other.value, o=second).restore(saved)
    step(other, second)
    return weight.value, other.value


def module(strategy):
    made = tf.Module()
    made.v = variable(strategy, 3.0)
    made.total = on_read(strategy, 0.0, SUM)
    strategy.run(lambda: made.total.assign_add(number()))
    made.f = tf.function(
        lambda x: x * made.v + made.total,
        input_signature=[tf.TensorSpec([], tf.float32)],
    )
    return made


@check()
def a_saved_model_on_one_device(strategy):
    path = place()
    tf.saved_model.save(module(strategy), path)
    loaded = tf.saved_model.load(path)
    return loaded.f(tf.constant(2.0)), loaded.v, loaded.total


@check()
def a_saved_model_with_a_signature(strategy):
    path, made = place(), module(strategy)
    tf.saved_model.save(made, path, signatures=made.f)
    loaded = tf.saved_model.load(path)
    served = loaded.signatures["serving_default"]
    return served(tf.constant(2.0))


@check(
    differs="a sum that is read has the whole number that it was given",
    here=[[3.0] * 3, [3.0, 3.0, 6.0]],
)
def a_saved_model_in_a_scope(strategy):
    path = place()
    tf.saved_model.save(module(strategy), path)
    with strategy.scope():
        loaded = tf.saved_model.load(path)
    found = in_function(strategy, lambda x: loaded.f(x), numbers(strategy))
    return loaded.v, found


@check()
def a_saved_model_of_one_device_in_a_scope(strategy):
    path, made = place(), tf.Module()
    made.v = tf.Variable(3.0)
    made.f = tf.function(
        lambda x: x * made.v, input_signature=[tf.TensorSpec([], tf.float32)]
    )
    tf.saved_model.save(made, path)
    with strategy.scope():
        loaded = tf.saved_model.load(path)
    loaded.v.assign(4.0)
    found = in_function(strategy, lambda x: loaded.f(x), numbers(strategy))
    return loaded.v, found


@check()
def a_saved_model_is_trained_on(strategy):
    path, made = place(), tf.Module()
    made.v = tf.Variable(3.0)
    made.f = tf.function(
        lambda x: x * made.v, input_signature=[tf.TensorSpec([], tf.float32)]
    )
    tf.saved_model.save(made, path)
    with strategy.scope():
        loaded = tf.saved_model.load(path)

    def program(x):
        with tf.GradientTape() as tape:
            y = loaded.f(x)
        return tape.gradient(y, loaded.v)

    return in_function(strategy, program, numbers(strategy))


@check()
def a_saved_model_with_expanded_variables(strategy):
    path = place()
    options = tf.saved_model.SaveOptions(
        experimental_variable_policy="expand_distributed_variables"
    )
    tf.saved_model.save(module(strategy), path, options=options)
    loaded = tf.saved_model.load(path)
    return loaded.f(tf.constant(2.0))


def small_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])


@check()
def a_model_of_keras_is_saved(strategy):
    with strategy.scope():
        model = small_model()
    path = place() + ".keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    with strategy.scope():
        again = keras.models.load_model(path)
    return [each.get_weights() for each in (model, loaded, again)]


@check()
def weights_of_keras_are_saved(strategy):
    with strategy.scope():
        model = small_model()
    path = place() + ".weights.h5"
    model.save_weights(path)
    before = model.get_weights()
    model.set_weights([np.zeros_like(each) for each in before])
    model.load_weights(path)
    return before, [weight.value for weight in model.weights]


@check()
def a_model_of_keras_is_exported(strategy):
    with strategy.scope():
        model = small_model()
    path = place()
    model.export(path, verbose=False)
    loaded = tf.saved_model.load(path)
    return loaded.serve(tf.ones([1, 2])), model(tf.ones([1, 2]))
