"""Batches of distributed data sets, from data sets and from functions."""

import tensorflow as tf

from strategy_checks.programs import FIRST
from strategy_checks.programs import batches
from strategy_checks.programs import rows
from strategy_checks.programs import variable
from strategy_checks.table import check


@check()
def batches_that_divide(strategy):
    return list(batches(strategy, rows(6), 3))


@check()
def batches_that_do_not_divide(strategy):
    return list(batches(strategy, rows(10), 4))


@check()
def batches_without_the_last_one(strategy):
    dataset = tf.data.Dataset.range(10).batch(6, drop_remainder=True)
    distributed = strategy.experimental_distribute_dataset(dataset)
    return list(distributed), str(distributed.element_spec)


@check(raises=StopIteration)
def an_iterator_at_its_end(strategy):
    iterator = iter(batches(strategy, rows(3), 3))
    next(iterator)
    next(iterator)


@check(raises=tf.errors.OutOfRangeError)
def the_end_of_data_in_a_function(strategy):
    @tf.function
    def run(iterator):
        for _ in tf.range(3):
            strategy.run(tf.reduce_sum, args=(next(iterator),))

    run(iter(batches(strategy, rows(6), 3)))


@check()
def batches_are_on_the_devices(strategy):
    batch = next(iter(batches(strategy, rows(6), 6)))
    local = strategy.experimental_local_results(batch)
    return [part.backing_device for part in local]


@check()
def an_element_spec_is_a_signature(strategy):
    distributed = batches(strategy, rows(10), 4)

    @tf.function(input_signature=[distributed.element_spec])
    def run(batch):
        return strategy.run(lambda x: x * 2.0, args=(batch,))

    return [run(batch) for batch in distributed]


@check()
def a_function_draws_from_an_iterator(strategy):
    @tf.function
    def run(iterator):
        first, second = next(iterator), iterator.get_next()
        return strategy.run(lambda x, y: x + y, args=(first, second))

    return run(iter(batches(strategy, rows(6), 3)))


@check()
def a_loop_over_data_in_a_function(strategy):
    made = variable(strategy, 1.0, aggregation=FIRST)

    @tf.function
    def run(distributed):
        steps, product = tf.constant(0.0), tf.constant(1.0)
        for batch in distributed:
            steps += 1.0
            product *= strategy.reduce("MEAN", batch, axis=0)
            strategy.run(lambda x: made.assign_add(1.0), args=(batch,))
        return steps, product

    return run(batches(strategy, rows(6), 3)), made


@check()
def a_loop_over_steps_in_a_function(strategy):
    @tf.function
    def run(iterator):
        total = 0.0
        for _ in tf.range(3):
            found = strategy.run(tf.reduce_sum, args=(next(iterator),))
            total += strategy.reduce("SUM", found, axis=None)
        return total

    iterator = iter(batches(strategy, rows(18), 3))
    return run(iterator), run(iterator)


@check()
def optional_batches_in_a_loop(strategy):
    @tf.function
    def run(iterator):
        total = 0.0
        for _ in tf.range(9):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            found = strategy.run(tf.reduce_sum, args=(optional.get_value(),))
            total += strategy.reduce("SUM", found, axis=None)
        return total

    return run(iter(batches(strategy, rows(10), 4)))


@check()
def uneven_parts_have_their_own_size(strategy):
    def program(x):
        return tf.size(x), tf.shape(x)[0], tf.reduce_sum(x)

    run = tf.function(lambda x: strategy.run(program, args=(x,)))
    return [run(batch) for batch in batches(strategy, rows(6), 4)]


@check()
def the_mean_of_an_uneven_batch(strategy):
    found = []
    for batch in batches(strategy, rows(5)[:, None], 4):
        found.append(strategy.reduce("MEAN", batch, axis=0))
        found.append(strategy.reduce("SUM", batch, axis=0))
    return found


def of_function(strategy, dataset, **options):
    """The batches of a function, one data set for all replicas."""
    return strategy.distribute_datasets_from_function(
        dataset, tf.distribute.InputOptions(**options) if options else None
    )


@check()
def batches_of_a_function(strategy):
    told = []

    def dataset(given):
        told.append(
            [
                given.num_input_pipelines,
                given.input_pipeline_id,
                given.num_replicas_in_sync,
                given.get_per_replica_batch_size(6),
                tf.distribute.in_cross_replica_context(),
            ]
        )
        return tf.data.Dataset.range(9)

    return list(of_function(strategy, dataset)), told


@check(raises=ValueError)
def a_batch_of_a_function_does_not_divide(strategy):
    def dataset(given):
        size = given.get_per_replica_batch_size(7)
        return tf.data.Dataset.range(7).batch(size)

    of_function(strategy, dataset)


@check()
def batches_of_a_function_of_several_shapes(strategy):
    def dataset(given):
        first = tf.data.Dataset.from_tensors([1.0, 2.0])
        return first.concatenate(tf.data.Dataset.from_tensors([1.0] * 3))

    @tf.function
    def run(batch):
        return strategy.run(tf.reduce_mean, args=(batch,))

    return [run(batch) for batch in of_function(strategy, dataset)]


@check()
def options_of_input(strategy):
    options = tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_per_replica_buffer_size=2,
    )
    dataset = tf.data.Dataset.range(9).batch(3)
    return list(strategy.experimental_distribute_dataset(dataset, options))


@check()
def a_data_set_per_replica(strategy):
    return list(
        of_function(
            strategy,
            lambda given: tf.data.Dataset.range(3),
            experimental_replication_mode=(
                tf.distribute.InputReplicationMode.PER_REPLICA
            ),
            experimental_place_dataset_on_device=True,
            experimental_fetch_to_device=False,
        )
    )


@check()
def the_number_of_batches(strategy):
    distributed = batches(strategy, rows(10), 4)
    return distributed.cardinality


@check(raises=tf.errors.InvalidArgumentError)
def an_error_in_a_map_of_data(strategy):
    def mapped(x):
        tf.debugging.assert_less(x, tf.constant(4, tf.int64))
        return x

    dataset = tf.data.Dataset.range(6).map(mapped).batch(3)
    list(strategy.experimental_distribute_dataset(dataset))


@check()
def data_and_batches_are_distributed(strategy):
    distributed = batches(strategy, rows(6), 3)
    kinds = tf.distribute.DistributedDataset, tf.distribute.DistributedIterator
    found = (
        isinstance(distributed, kinds[0]),
        isinstance(iter(distributed), kinds[1]),
    )
    return found
