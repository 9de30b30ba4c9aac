"""Batches and results that are trees, or sparse, or ragged."""

import collections

import numpy as np
import tensorflow as tf

from strategy_checks.programs import batches
from strategy_checks.programs import both
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import rows
from strategy_checks.programs import slices
from strategy_checks.table import check

Pair = collections.namedtuple("Pair", ["x", "y"])


@check()
def batches_that_are_dicts(strategy):
    tensors = {"x": rows(6), "y": (rows(6)[:, None], np.arange(6))}

    def program(given):
        return {"sum": given["x"] + given["y"][0][:, 0], "y": given["y"]}

    return both(strategy, program, next(iter(batches(strategy, tensors, 3))))


@check()
def batches_that_are_named_tuples(strategy):
    batch = next(iter(batches(strategy, Pair(rows(6), rows(6)[:, None]), 6)))
    assert isinstance(batch, Pair)
    return both(strategy, lambda given: Pair(given.y, given.x), batch)


@check()
def batches_of_words(strategy):
    words = np.array(["a", "b", "c", "d"])
    batch = next(iter(batches(strategy, words, 4)))
    return both(strategy, lambda x: tf.strings.length(x), batch)


@check()
def ragged_batches(strategy):
    tensor = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0], [5.0, 6.0]])
    batch = next(iter(batches(strategy, tensor, 5)))
    return in_function(strategy, lambda x: tf.reduce_sum(x, axis=1), batch)


@check()
def sparse_batches(strategy):
    tensor = tf.sparse.from_dense(np.eye(6, dtype="float32") * rows(6))
    batch = next(iter(batches(strategy, tensor, 6)))
    return in_function(strategy, lambda x: tf.sparse.to_dense(x), batch)


@check()
def sparse_and_ragged_batches_of_a_function(strategy):
    def dataset(given):
        ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]])
        sparse = tf.sparse.from_dense(np.eye(3, dtype="float32"))
        tensors = {"ragged": ragged, "sparse": sparse}
        return tf.data.Dataset.from_tensor_slices(tensors).batch(1)

    def program(batch):
        total = tf.reduce_sum(batch["ragged"])
        return total + tf.sparse.reduce_sum(batch["sparse"])

    distributed = strategy.distribute_datasets_from_function(dataset)
    return in_function(strategy, program, next(iter(distributed)))


@check()
def replicas_return_sparse_values(strategy):
    def program():
        return tf.sparse.from_dense(tf.eye(2) * (number() + 1.0))

    return both(strategy, program)


@check()
def replicas_return_ragged_values(strategy):
    def program():
        return tf.RaggedTensor.from_row_lengths([number(), 1.0, 2.0], [1, 2])

    return both(strategy, program)


@check()
def replicas_return_slices(strategy):
    def program():
        return slices(tf.fill([1], number()), [0])

    return both(strategy, program)


@check()
def replicas_return_dicts_in_another_order(strategy):
    return both(strategy, lambda: {"b": number(), "a": number() + 1.0})


@check()
def replicas_return_named_tuples(strategy):
    found = both(strategy, lambda: Pair(number(), [number() + 1.0]))
    return [type(each) is Pair for each in found], found


@check()
def ragged_values_are_passed_on(strategy):
    ragged = strategy.run(
        lambda: tf.RaggedTensor.from_row_lengths([number(), 1.0], [0, 2])
    )
    return in_function(strategy, lambda x: tf.reduce_sum(x, axis=1), ragged)


@check()
def parts_of_a_tuple_are_given_apart(strategy):
    x, y = next(iter(batches(strategy, (rows(6), rows(6) * 2.0), 6)))
    return in_function(strategy, lambda a, b: a * b, x, y)
