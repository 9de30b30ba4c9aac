"""Reductions of distributed values outside of replicas."""

import tensorflow as tf

from strategy_checks.programs import FIRST
from strategy_checks.programs import SUM
from strategy_checks.programs import context
from strategy_checks.programs import each
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import on_read
from strategy_checks.programs import own_row
from strategy_checks.programs import variable
from strategy_checks.table import check


@check()
def a_sum_and_a_mean_everywhere(strategy):
    given = numbers(strategy)
    found = []
    for word in ("SUM", "MEAN", "sum", tf.distribute.ReduceOp.SUM):

        def reduce(word=word):
            return strategy.reduce(word, given, axis=None)

        with strategy.scope():
            found += [reduce(), tf.function(reduce)()]
        found += [reduce(), tf.function(reduce)()]
    return found


@check()
def a_sum_of_a_loss_in_a_function(strategy):
    @tf.function
    def run():
        losses = strategy.run(lambda: tf.reduce_sum(number() * [1.0, 2.0]))
        return strategy.reduce("SUM", losses, axis=None)

    return run()


def uneven():
    return tf.ones([context().replica_id_in_sync_group + 1, 2]) * number()


@check()
def reductions_along_axes(strategy):
    given = strategy.run(lambda: tf.fill([2, 2], number()))
    return [
        strategy.reduce(word, given, axis=axis)
        for word in ("SUM", "MEAN")
        for axis in (0, 1, (0,), (0, 1))
    ]


@check()
def reductions_of_uneven_parts(strategy):
    given = strategy.run(uneven)
    return [
        strategy.reduce(word, given, axis=axis)
        for word in ("SUM", "MEAN")
        for axis in (0, (0, 1))
    ]


@check()
def a_negative_axis(strategy):
    given = strategy.run(lambda: tf.fill([2, 3], number()))
    return strategy.reduce("MEAN", given, axis=-1)


@check()
def parts_whose_size_is_not_known(strategy):
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def run(tensor):
        def program():
            return tensor[: context().replica_id_in_sync_group + 1]

        given = strategy.run(program)
        return [strategy.reduce(op, given, axis=0) for op in ("SUM", "MEAN")]

    return run(tf.constant([1.0, 2.0, 6.0]))


@check()
def integers_are_reduced(strategy):
    found = {}
    for dtype in (tf.int32, tf.int64, tf.uint8):
        given = each(strategy, lambda index, d=dtype: tf.cast([index, 4], d))
        found[dtype.name] = [
            strategy.reduce("SUM", given, axis=None),
            strategy.reduce("SUM", given, axis=0),
            strategy.reduce("MEAN", given, axis=0),
        ]
    return found


@check()
def other_numbers_are_summed(strategy):
    found = {}
    for dtype in (tf.float16, tf.bfloat16, tf.float64, tf.complex64):
        given = each(strategy, lambda index, d=dtype: tf.cast([index, 4], d))
        value = strategy.reduce("SUM", given, axis=None)
        found[value.dtype.name] = tf.cast(value, tf.complex64)
    return found


@check()
def a_tensor_is_its_own_mean(strategy):
    return [
        strategy.reduce("MEAN", tf.constant(2.0), axis=None),
        strategy.reduce("MEAN", 2.0, axis=None),
    ]


@check(raises=ValueError)
def a_tensor_is_not_summed(strategy):
    strategy.reduce("SUM", tf.constant(2.0), axis=None)


@check()
def sparse_values_are_summed(strategy):
    found = strategy.reduce("SUM", strategy.run(own_row), axis=None)
    return tf.convert_to_tensor(found)


@check()
def variables_are_reduced(strategy):
    total = on_read(strategy, 0.0, SUM)
    strategy.run(lambda: total.assign_add(number()))
    equal = variable(strategy, 2.0)
    return [
        strategy.reduce("SUM", total, axis=None),
        strategy.reduce("MEAN", total, axis=None),
        strategy.reduce("MEAN", equal, axis=None),
    ]


@check(raises=AssertionError)
def a_sum_of_equal_copies(strategy):
    strategy.reduce("SUM", variable(strategy, 2.0), axis=None)


@check()
def a_tree_is_reduced(strategy):
    given = strategy.run(lambda: {"a": number(), "b": [number() + 1.0]})
    return tf.nest.map_structure(
        lambda leaf: strategy.reduce("SUM", leaf, axis=None), given
    )


@check(raises=ValueError)
def another_word_than_an_operation(strategy):
    strategy.reduce("PRODUCT", numbers(strategy), axis=None)


@check(raises=TypeError)
def a_reduction_without_an_axis(strategy):
    strategy.reduce("SUM", numbers(strategy))


@check()
def a_gradient_through_a_reduction_outside(strategy):
    made = variable(strategy, 2.0)
    with tf.GradientTape() as tape:
        losses = strategy.run(lambda: made * made * (number() + 1.0))
        loss = strategy.reduce("SUM", losses, axis=None)
    return tape.gradient(loss, made.values)


@check()
def a_reduced_value_goes_back_into_replicas(strategy):
    @tf.function
    def run():
        total = strategy.reduce("SUM", strategy.run(number), axis=None)
        return strategy.run(lambda x: x * number(), args=(total,))

    return run()


@check()
def values_of_the_first_replica(strategy):
    made = on_read(strategy, 0.0, FIRST)
    strategy.run(lambda: made.assign(number() + 5.0))
    return made.read_value(), made.numpy()


@check()
def losses_are_scaled(strategy):
    def program():
        per_sample = tf.constant([1.0, 3.0]) * number()
        return [
            tf.nn.compute_average_loss(per_sample),
            tf.nn.compute_average_loss(per_sample, global_batch_size=12),
            tf.nn.scale_regularization_loss(6.0),
        ]

    return both_reduced(strategy, program)


def both_reduced(strategy, program):
    found = tf.function(lambda: strategy.run(program))()
    return [strategy.reduce("SUM", part, axis=None) for part in found]


@check(
    raises=TypeError,
    differs="complex numbers and those of 8 bits are not reduced",
    here=TypeError,
)
def a_complex_sum_of_replicas(strategy):
    return strategy.run(
        lambda: context().all_reduce("SUM", tf.complex(number(), 1.0))
    )
