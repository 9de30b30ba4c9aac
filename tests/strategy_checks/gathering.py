"""Values of all replicas that are joined, outside of replicas and in them."""

import tensorflow as tf

from strategy_checks.programs import both
from strategy_checks.programs import context
from strategy_checks.programs import each
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import slices
from strategy_checks.programs import variable
from strategy_checks.table import check

REFUSED = tf.errors.InvalidArgumentError


def outside(strategy, given, axis):
    """What is joined eagerly, and in a function."""
    gather = lambda: strategy.gather(given, axis=axis)  # noqa: E731
    return [gather(), tf.function(gather)()]


def inside(strategy, made, axis):
    """What replicas join of what each makes."""
    return both(strategy, lambda: context().all_gather(made(), axis=axis))


def filled(shape):
    return lambda: tf.fill(shape, number())


def add_axes(rank, axis):
    shape = [2, 1, 3][:rank]

    @check(f"rows_of_rank_{rank}_are_joined_along_{axis}")
    def joined(strategy):
        given = strategy.run(filled(shape))
        return outside(strategy, given, axis), inside(
            strategy, filled(shape), axis
        )


for _rank, _axis in ((1, 0), (2, 1), (3, 1)):
    add_axes(_rank, _axis)


def uneven(axis):
    def made():
        shape = [2, 2]
        shape[axis] = context().replica_id_in_sync_group + 1
        return tf.fill(tf.stack(shape), number())

    return made


@check()
def uneven_rows_are_joined(strategy):
    return [
        outside(strategy, strategy.run(uneven(axis)), axis) for axis in (0, 1)
    ]


@check()
def replicas_join_uneven_rows(strategy):
    return [inside(strategy, uneven(axis), axis) for axis in (0, 1)]


@check()
def other_values_are_joined(strategy):
    return [
        strategy.gather(each(strategy, lambda i: tf.constant([i])), axis=0),
        strategy.gather(each(strategy, lambda i: [i > 0]), axis=0),
        strategy.gather(
            each(strategy, lambda i: tf.constant([i], tf.int64)), axis=0
        ),
    ]


@check()
def a_tensor_is_joined_with_nothing(strategy):
    return strategy.gather(tf.constant([1.0, 2.0]), axis=0)


@check()
def a_variable_is_joined(strategy):
    return strategy.gather(variable(strategy, [1.0, 2.0]), axis=0)


@check()
def replicas_join_trees(strategy):
    def program():
        tree = {"a": tf.fill([1], number()), "b": [tf.fill([2], number())]}
        return context().all_gather(tree, axis=0)

    return both(strategy, program)


@check()
def a_gradient_through_joined_rows(strategy):
    def program():
        x = tf.fill([1], number() + 1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = context().all_gather(x * x, axis=0)
            loss = tf.reduce_sum(y * [1.0, 2.0, 3.0]) * (number() + 1.0)
        return tape.gradient(loss, x)

    return both(strategy, program)


@check(raises=(REFUSED, ValueError))
def rows_of_other_shapes(strategy):
    given = each(strategy, lambda index: tf.ones([1, index + 1]))
    strategy.gather(given, axis=0)


@check(raises=(REFUSED, ValueError))
def rows_of_other_shapes_in_a_function(strategy):
    given = each(strategy, lambda index: tf.ones([1, index + 1]))
    tf.function(lambda: strategy.gather(given, axis=0))()


@check(raises=(REFUSED, ValueError))
def rows_of_other_ranks(strategy):
    given = each(strategy, lambda index: tf.ones([1] * (index + 1)))
    strategy.gather(given, axis=0)


@check(raises=(REFUSED, ValueError))
def numbers_have_no_rows(strategy):
    strategy.gather(numbers(strategy), axis=0)


@check(raises=NotImplementedError)
def sparse_values_are_not_joined(strategy):
    given = strategy.run(lambda: slices(tf.fill([1], number()), [0]))
    strategy.gather(given, axis=0)


@check(raises=NotImplementedError)
def replicas_do_not_join_sparse_values(strategy):
    in_function(
        strategy,
        lambda: context().all_gather(
            slices(tf.fill([1], number()), [0]), axis=0
        ),
    )


@check()
def rows_of_batches_are_joined(strategy):
    dataset = tf.data.Dataset.range(7).batch(7)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    return strategy.gather(batch, axis=0)
