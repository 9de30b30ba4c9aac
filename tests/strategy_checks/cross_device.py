"""Reductions and copies to devices, by `strategy.extended`."""

import tensorflow as tf

from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import own_row
from strategy_checks.programs import slices
from strategy_checks.programs import variable
from strategy_checks.table import check

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def another(strategy, operations):
    """A strategy of the same kind with other cross-device operations."""
    devices = [f"CPU:{index}" for index in range(3)]
    return type(strategy)(devices, cross_device_ops=operations)


def where(tensor):
    return tensor.device.rpartition("/")[2]


@check()
def a_sum_on_a_device(strategy):
    found = [
        strategy.extended.reduce_to(op, numbers(strategy), "CPU:1")
        for op in (SUM, MEAN, "SUM")
    ]
    return found, [where(tensor) for tensor in found]


@check()
def a_sum_where_a_variable_is(strategy):
    given, reduce = strategy.run(number), strategy.extended.reduce_to
    found = []
    for start in (0.0, [1.0, 2.0]):
        made = variable(strategy, start)
        found += [
            reduce(SUM, given, destinations=made),
            tf.function(lambda made=made: reduce(SUM, given, made))(),
        ]
    return found


@check()
def a_sum_where_a_value_is(strategy):
    given = strategy.run(number)
    return strategy.extended.reduce_to(MEAN, given, destinations=given)


@check()
def the_mean_of_what_is_equal(strategy):
    made = variable(strategy, 1.0)
    equal = strategy.extended.broadcast_to(tf.constant(2.0), made)
    reduce = strategy.extended.reduce_to
    return reduce(MEAN, equal, made), reduce(MEAN, made, made)


@check()
def a_sum_of_sparse_values_where_a_variable_is(strategy):
    made = variable(strategy, [1.0] * 3)

    found = strategy.extended.reduce_to(SUM, strategy.run(own_row), made)
    local = strategy.experimental_local_results(found)
    return [tf.convert_to_tensor(part) for part in local]


@check()
def a_copy_on_every_device(strategy):
    made = variable(strategy, 1.0)
    broadcast = strategy.extended.broadcast_to
    found = [
        broadcast(tf.constant(3.0), destinations=made),
        broadcast(tf.constant(3.0), destinations=strategy.run(number)),
    ]
    local = strategy.experimental_local_results(found[0])
    return found, [where(part) for part in local]


@check()
def a_copy_on_one_device(strategy):
    found = strategy.extended.broadcast_to(tf.constant(3.0), "CPU:2")
    return found, where(found)


@check()
def several_sums_at_once(strategy):
    made, given = variable(strategy, 0.0), strategy.run(number)
    other = strategy.run(lambda: tf.fill([2], number()))
    reduce = strategy.extended.batch_reduce_to
    pairs = [(given, made), (other, other), (given, given)]
    return reduce(SUM, pairs), reduce(MEAN, pairs), reduce("SUM", pairs[:1])


@check()
def several_sums_in_a_function(strategy):
    made = variable(strategy, 0.0)

    @tf.function
    def run():
        given = strategy.run(number)
        return strategy.extended.batch_reduce_to(
            SUM, [(given, made), (given, given)]
        )

    return run()


@check()
def several_sums_of_several_dtypes(strategy):
    given = strategy.run(number)
    whole = strategy.run(lambda: tf.cast(number(), tf.int64))
    wide = strategy.run(lambda: tf.cast(number(), tf.float64))
    return strategy.extended.batch_reduce_to(
        SUM, [(given, given), (whole, whole), (wide, wide)]
    )


@check()
def several_sums_dense_and_sparse(strategy):
    made = variable(strategy, [1.0] * 3)
    dense = strategy.run(lambda: tf.fill([3], number()))
    sparse = strategy.run(lambda: slices(tf.fill([1], number()), [1]))
    found = strategy.extended.batch_reduce_to(
        SUM, [(dense, made), (sparse, made)]
    )
    local = strategy.experimental_local_results(found[1])
    return found[0], [tf.convert_to_tensor(part) for part in local]


@check()
def a_sum_with_options(strategy):
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=1024
    )
    given = strategy.run(number)
    return strategy.extended.batch_reduce_to(
        SUM, [(given, given)] * 2, options=options
    )


@check()
def a_sum_with_hints(strategy):
    given = strategy.run(number)
    hints = tf.distribute.experimental.CollectiveHints(50 * 1024)
    return strategy.extended.reduce_to(SUM, given, given, options=hints)


@check()
def the_devices_of_the_strategy(strategy):
    extended = strategy.extended
    made = variable(strategy, 0.0)
    return [
        extended.worker_devices,
        extended.parameter_devices,
        extended.non_slot_devices([made]),
        strategy.num_replicas_in_sync,
    ]


@check()
def an_update_beside_no_variable(strategy):
    extended = strategy.extended
    devices = extended.non_slot_devices([variable(strategy, 0.0)])
    return extended.update_non_slot(
        devices, lambda x: x + 1.0, args=(tf.constant(1.0),), group=False
    )


@check()
def minimizing_by_hand(strategy):
    weight = variable(strategy, [[0.3]])
    extended = strategy.extended

    def program():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(weight * (number() + 1.0) - 1.0))
        return tape.gradient(loss, weight)

    @tf.function
    def step():
        gradient = extended.call_for_each_replica(program)
        gradient = extended.reduce_to(SUM, gradient, destinations=weight)
        extended.update(
            weight, lambda copy, x: copy.assign_sub(0.01 * x), (gradient,)
        )

    for _ in range(3):
        step()
    return weight


@check()
def cross_device_operations_of_the_user(strategy):
    seen = []

    class Counting(tf.distribute.ReductionToOneDevice):
        def reduce_implementation(self, *args, **options):
            seen.append("reduce")
            return super().reduce_implementation(*args, **options)

        def batch_reduce_implementation(self, *args, **options):
            seen.append("batch")
            return super().batch_reduce_implementation(*args, **options)

    own = another(strategy, Counting())
    given = own.run(number)
    total = own.reduce("SUM", given, axis=None)
    pairs = own.extended.batch_reduce_to(SUM, [(given, given)] * 2)
    return total, pairs, "reduce" in seen, "batch" in seen


@check()
def cross_device_operations_of_tensorflow(strategy):
    found = []
    for operations in (
        tf.distribute.NcclAllReduce(),
        tf.distribute.HierarchicalCopyAllReduce(),
        tf.distribute.ReductionToOneDevice(),
        tf.distribute.ReductionToOneDevice("CPU:1", tf.math.accumulate_n),
    ):
        own = another(strategy, operations)
        found.append(own.reduce("SUM", own.run(number), axis=None))
    return found


@check(raises=ValueError)
def cross_device_operations_of_another_kind(strategy):
    another(strategy, "nccl")
