"""How the programs of checks are run, and what they return."""

import numpy as np
import tensorflow as tf

NONE = tf.VariableAggregation.NONE
SUM = tf.VariableAggregation.SUM
MEAN = tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA
AGGREGATIONS = {"none": NONE, "sum": SUM, "mean": MEAN, "first": FIRST}
ON_READ = tf.VariableSynchronization.ON_READ


def context():
    """The context of the replica that runs."""
    return tf.distribute.get_replica_context()


def number():
    """The number of the replica that runs, as a float."""
    return tf.cast(context().replica_id_in_sync_group, tf.float32)


def variable(strategy, *args, **options):
    """A variable that is made in the scope of a strategy."""
    with strategy.scope():
        return tf.Variable(*args, **options)


def on_read(strategy, value, aggregation):
    """A variable whose copies are reduced when it is read."""
    return variable(
        strategy, value, synchronization=ON_READ, aggregation=aggregation
    )


def devices_of(strategy, value):
    """Where the replicas have a value."""
    local = strategy.experimental_local_results(value)
    return [part.device for part in local]


def in_function(strategy, program, *args):
    """What replicas return whose program is traced by a `tf.function`."""
    # Autograph would read each program, which takes long.
    traced = tf.function(
        lambda *each: strategy.run(program, args=each), autograph=False
    )
    return traced(*args)


def both(strategy, program, *args):
    """What replicas return that run eagerly, and then in a function."""
    eager = strategy.run(program, args=args)
    return [eager, in_function(strategy, program, *args)]


def numbers(strategy):
    """A distributed value: the numbers of the replicas."""
    return each(strategy, lambda index: tf.constant(float(index)))


def each(strategy, made):
    """A distributed value that a function makes of the replica's number."""
    return strategy.experimental_distribute_values_from_function(
        lambda value: made(value.replica_id_in_sync_group)
    )


def batches(strategy, tensors, size):
    """A distributed data set of batches of tensors."""
    dataset = tf.data.Dataset.from_tensor_slices(tensors).batch(size)
    return strategy.experimental_distribute_dataset(dataset)


def rows(count):
    """As many numbers as there shall be rows."""
    return np.arange(count, dtype="float32") + 1


def slices(values, indices, size=3):
    """Sparse values, as gradients of an embedding are."""
    return tf.IndexedSlices(
        tf.convert_to_tensor(values),
        tf.convert_to_tensor(indices),
        tf.constant([size]),
    )


def own_row():
    """Sparse values in which each replica has a row of its own."""
    return slices(
        tf.fill([1], number() + 1.0), [context().replica_id_in_sync_group]
    )


def raised(kind, program):
    """The class of the error that a program raises, which is of a kind."""
    try:
        program()
    except kind as error:
        return type(error)
    return "nothing"
