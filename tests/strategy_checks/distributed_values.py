"""Values of which each replica has one of its own."""

import numpy as np
import tensorflow as tf

from strategy_checks.programs import both
from strategy_checks.programs import context
from strategy_checks.programs import devices_of
from strategy_checks.programs import each
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import variable
from strategy_checks.table import check


@check()
def values_of_tensors_and_arrays(strategy):
    return (
        each(strategy, lambda index: tf.constant(index)),
        each(strategy, lambda index: np.arange(3.0) * index),
        each(strategy, lambda index: index),
    )


@check()
def values_of_trees(strategy):
    return each(strategy, lambda index: {"a": (index, 2.0 * index), "b": [1]})


@check()
def values_that_are_sparse(strategy):
    def made(index):
        return tf.SparseTensor([[0, 0], [1, index]], [1, 2], [3, 4])

    return both(strategy, lambda x: x, each(strategy, made))


@check()
def values_that_are_ragged(strategy):
    def made(index):
        return tf.ragged.constant([[1] * (index + 1), [2]])

    given = each(strategy, made)
    return given, both(strategy, lambda x: tf.reduce_sum(x, axis=1), given)


@check()
def values_of_words(strategy):
    given = each(strategy, lambda index: tf.constant(f"word {index}"))
    return both(strategy, tf.strings.upper, given)


@check()
def a_function_of_values_knows_the_replicas(strategy):
    told = []

    def made(value):
        told.append(
            [value.replica_id_in_sync_group, value.num_replicas_in_sync]
        )
        return 0

    strategy.experimental_distribute_values_from_function(made)
    return told


@check()
def values_are_where_they_are_made(strategy):
    devices = strategy.extended.worker_devices

    def made(index):
        with tf.device(devices[index]):
            return tf.identity(1.0)

    given = each(strategy, made), numbers(strategy)
    return [devices_of(strategy, value) for value in given]


@check()
def values_are_made_in_a_function(strategy):
    @tf.function
    def run():
        given = numbers(strategy)
        return strategy.run(tf.square, args=(given,))

    return run()


@check()
def results_of_replicas_are_where_they_ran(strategy):
    found = both(strategy, lambda: number() + 1.0)
    return [devices_of(strategy, value) for value in found]


@check()
def results_are_distributed_values(strategy):
    kind = tf.distribute.DistributedValues
    return [isinstance(value, kind) for value in both(strategy, number)]


@check()
def a_function_is_given_a_distributed_value(strategy):
    traces = []

    @tf.function
    def run(given):
        traces.append(1)
        return strategy.run(lambda x: x + 1.0, args=(given,))

    given = numbers(strategy)
    return run(given), run(run(given)), len(traces)


@check()
def a_signature_of_a_distributed_value(strategy):
    given = numbers(strategy)
    run = tf.function(
        lambda x: strategy.run(lambda y: y * 2, args=(x,)),
        input_signature=[tf.type_spec_from_value(given)],
    )
    return run(given)


@check()
def a_loop_carries_a_distributed_value(strategy):
    @tf.function
    def run(given):
        for _ in tf.range(3):
            given = strategy.run(lambda x: x * 2.0 + 1.0, args=(given,))
        return given

    return run(strategy.run(number))


@check()
def a_condition_gives_a_distributed_value(strategy):
    @tf.function
    def run(given, flag):
        return tf.cond(
            flag,
            lambda: strategy.run(lambda x: x + 1.0, args=(given,)),
            lambda: given,
        )

    given = strategy.run(number)
    return run(given, tf.constant(True)), run(given, tf.constant(False))


@check()
def parts_of_a_distributed_value_by_tf_nest(strategy):
    given = strategy.run(number)
    return tf.nest.map_structure(
        lambda part: part + 1.0, given, expand_composites=True
    ), tf.nest.flatten(given, expand_composites=True)


@check()
def local_results_of_other_things(strategy):
    made = variable(strategy, 1.0)
    local = strategy.experimental_local_results
    return [local(3.0), local(tf.constant(2.0)), local([1, 2]), local(made)]


@check()
def local_results_in_a_function(strategy):
    @tf.function
    def run():
        value = strategy.run(number)
        return tf.stack(strategy.experimental_local_results(value))

    return run()


@check()
def replicas_pass_values_on(strategy):
    first = strategy.run(number)
    return in_function(
        strategy,
        lambda x, y: x + y + number(),
        strategy.run(lambda x: x * 2.0, args=(first,)),
        first,
    )


@check()
def replicas_return_objects_of_python(strategy):
    def program():
        index = tf.get_static_value(context().replica_id_in_sync_group)
        return {"number": int(index), "word": f"replica {index}", "none": None}

    return strategy.run(program)


@check()
def replicas_return_one_object(strategy):
    same = object()
    return strategy.run(lambda: same) is same


@check()
def a_distributed_value_prints(strategy):
    return "PerReplica" in repr(strategy.run(number))


@check()
def the_replicas_have_no_values_in_common(strategy):
    value = strategy.run(lambda: tf.fill([2], number()))
    local = strategy.experimental_local_results(value)
    return len(local), [isinstance(part, tf.Tensor) for part in local]
