"""Gradients that replicas compute."""

import tensorflow as tf

from strategy_checks.programs import MEAN
from strategy_checks.programs import both
from strategy_checks.programs import context
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import variable
from strategy_checks.table import check


def squared(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.square(x)
    return tape.gradient(y, x)


@check()
def a_gradient_by_what_replicas_are_given(strategy):
    given = numbers(strategy)
    eager = strategy.run(tf.function(squared), args=(given,))
    return eager, in_function(strategy, squared, given)


@check()
def a_gradient_by_a_variable(strategy):
    made = variable(strategy, 2.0)

    def program():
        with tf.GradientTape() as tape:
            y = made * made * number()
        return tape.gradient(y, made)

    return both(strategy, program)


@check()
def a_gradient_through_a_function(strategy):
    made = variable(strategy, 2.0)
    model = tf.function(lambda x: x * made * made)

    def program(x):
        with tf.GradientTape() as tape:
            y = model(x)
        return tape.gradient(y, made)

    given = numbers(strategy)
    return both(strategy, program, given), strategy.run(
        tf.function(program), args=(given,)
    )


@check()
def gradients_by_trees_and_unused_variables(strategy):
    made = {"a": variable(strategy, 1.0), "b": variable(strategy, 2.0)}

    def program():
        with tf.GradientTape(persistent=True) as tape:
            y = made["a"] * number()
            z = y * y
        return (
            tape.gradient(z, made),
            tape.gradient(y, [made["a"]]),
            tape.gradient(y, made["b"], unconnected_gradients="zero"),
        )

    return both(strategy, program)


@check()
def a_tape_that_watches_a_variable(strategy):
    made = variable(strategy, 2.0, trainable=False)

    def program():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(made)
            y = made * number()
        return tape.gradient(y, made), len(tape.watched_variables())

    return both(strategy, program)


@check()
def second_derivatives(strategy):
    made = variable(strategy, 2.0)

    def program():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = made * made * made * number()
            first = inner.gradient(y, made)
        return first, outer.gradient(first, made)

    return both(strategy, program)


@check()
def gradients_of_a_graph(strategy):
    def program():
        x = number() + 1.0
        return tf.gradients(x * x, [x])

    return in_function(strategy, program)


@check()
def a_sparse_gradient(strategy):
    made = variable(strategy, [[1.0], [2.0], [3.0]])

    def program():
        index = context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.gather(made, [index, 0]) * (number() + 1.0))
        gradient = tape.gradient(y, made)
        return tf.convert_to_tensor(gradient)

    return both(strategy, program)


@check()
def gradients_are_reduced_and_applied_by_hand(strategy):
    made = variable(strategy, [1.0, 2.0])

    def program(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made * made * x) / 6.0
        gradient = tape.gradient(loss, made)
        gradient = context().all_reduce("SUM", gradient)
        made.assign_sub(0.1 * gradient)
        return loss

    found = in_function(strategy, program, numbers(strategy))
    return strategy.reduce("SUM", found, axis=None), made


@check()
def gradients_are_reduced_outside(strategy):
    made = variable(strategy, 2.0)

    def program():
        with tf.GradientTape() as tape:
            loss = made * made * number()
        return {"gradient": tape.gradient(loss, made), "loss": loss}

    for found in both(strategy, program):
        made.assign_sub(strategy.reduce("SUM", found["gradient"], axis=None))
    return made


@check()
def a_mean_of_gradients_is_accumulated(strategy):
    weight = variable(strategy, 1.0)
    total = variable(strategy, 0.0, aggregation=MEAN)

    def program():
        with tf.GradientTape() as tape:
            loss = weight * number()
        total.assign_add(tape.gradient(loss, weight))

    step = tf.function(lambda: strategy.run(program))
    step()
    step()
    return total


@check()
def a_tape_around_a_run(strategy):
    made = variable(strategy, 2.0)
    with tf.GradientTape() as tape:
        found = strategy.run(lambda: made * made * number())
        first, *others = strategy.experimental_local_results(found)
        loss = first + tf.add_n(others)
    return tape.gradient(loss, made.values)
