"""Random numbers that replicas draw."""

import numpy as np
import tensorflow as tf

from strategy_checks.programs import both
from strategy_checks.programs import context
from strategy_checks.programs import in_function
from strategy_checks.programs import raised
from strategy_checks.table import check


def are_distinct(strategy, value):
    local = strategy.experimental_local_results(value)
    return len({np.asarray(part).tobytes() for part in local})


@check()
def a_generator_of_the_scope_has_streams(strategy):
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1)
    return both(strategy, lambda: generator.normal([2]))


@check()
def a_generator_goes_on(strategy):
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1, alg="philox")
    run = tf.function(lambda: strategy.run(lambda: generator.uniform([2])))
    return run(), run()


@check()
def a_generator_is_reset(strategy):
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1)
    first = strategy.run(lambda: generator.uniform([2]))
    generator.reset_from_seed(1)
    return first, strategy.run(lambda: generator.uniform([2]))


@check()
def numbers_without_a_state(strategy):
    def program():
        index = context().replica_id_in_sync_group
        equal = tf.random.stateless_uniform([2], [1, 2])
        own = tf.random.stateless_uniform([2], tf.stack([1, index]))
        folded = tf.random.experimental.stateless_fold_in([1, 2], index)
        return equal, own, folded

    return both(strategy, program)


@check()
def eager_replicas_draw_other_numbers(strategy):
    tf.random.set_seed(1)
    found = strategy.run(lambda: tf.random.uniform([2]))
    return are_distinct(strategy, found)


@check()
def traced_replicas_draw_other_numbers(strategy):
    tf.random.set_seed(1)
    found = in_function(strategy, lambda: tf.random.uniform([2]))
    return are_distinct(strategy, found)


@check()
def numbers_of_a_seed_in_a_function(strategy):
    tf.random.set_seed(1)
    program = tf.function(
        lambda: strategy.run(lambda: tf.random.uniform([2], seed=3))
    )
    return program(), program()


@check()
def generators_are_saved(strategy, path=None):
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1)
    run = tf.function(lambda: strategy.run(lambda: generator.uniform([2])))
    run()
    state = generator.state.read_value()
    return state, run()


@check()
def a_generator_of_one_device_in_replicas(strategy):
    generator = tf.random.Generator.from_seed(1)
    refused = ValueError, RuntimeError
    return raised(refused, lambda: strategy.run(lambda: generator.uniform([])))
