"""What a check gives on a strategy, and whether two results are equal."""

import keras
import numpy as np
import tensorflow as tf


def result(check, strategy):
    """Returns the tree of a check, or the class of the error that it raises.

    An error that the check does not declare is no result.
    """
    keras.utils.set_random_seed(0)
    declared = check.raises or ()
    try:
        return plain(strategy, check.run(strategy))
    except declared as error:
        return type(error)


def plain(strategy, tree):
    """Returns a tree without tensors: arrays, and lists for replicas."""
    if isinstance(tree, dict):
        return {key: plain(strategy, part) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(strategy, part) for part in tree]
    if isinstance(tree, tf.distribute.DistributedValues):
        local = strategy.experimental_local_results(tree)
        return [plain(strategy, part) for part in local]
    if isinstance(tree, tf.IndexedSlices):
        return [tree.values.numpy(), tree.indices.numpy()]
    if isinstance(tree, tf.SparseTensor):
        return tf.sparse.to_dense(tree).numpy()
    if isinstance(tree, tf.RaggedTensor):
        return tree.to_list()
    if isinstance(tree, keras.Variable):
        return plain(strategy, tree.value)
    if isinstance(tree, tf.Tensor | tf.Variable):
        return tree.numpy()
    return tree


def are_equal(expected, found):
    """Whether two results are equal to rounding.

    An error may be of a class below the expected one.
    """
    if isinstance(expected, type):
        return isinstance(found, type) and issubclass(found, expected)
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and expected.keys() == found.keys()
            and all(are_equal(expected[key], found[key]) for key in expected)
        )
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(
            map(are_equal, expected, found)
        )
    if isinstance(found, type | dict | list):
        return False
    if hasattr(expected, "dtype") and expected.dtype != found.dtype:
        return False  # the table writes numbers without a dtype
    return _are_equal_arrays(np.asarray(expected), np.asarray(found))


def _are_equal_arrays(expected, found):
    if expected.shape != found.shape:
        return False
    if expected.dtype.kind not in "fc":
        return bool(np.all(expected == found))
    return np.allclose(expected, found, rtol=1e-5, atol=1e-6, equal_nan=True)
