"""Warns of a batch that each replica of a step gets as a whole."""

import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._replication.replicas import Replicas


def warn_if_unsplit(name: str, count: int, arguments: Tree) -> bool:
    """Warns of arrays that go to all replicas as they are, and look like rows.

    Where an argument is split, these are arrays with as many rows as its parts
    have together. Where none is, they are all arrays.

    Args:
        name: The name of the step.
        count: The number of replicas.
        arguments: The arguments of the step.

    Returns:
        Whether it has warned.
    """
    leaves = trees.flatten(arguments)
    split = [leaf for leaf in leaves if isinstance(leaf, Replicas)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Replicas)]
    if any(isinstance(x, tf.distribute.DistributedValues) for x in others):
        return False  # and variables, of which each replica has its own
    rows = {sum(map(rows_of, parts)) for parts in split if len(parts) > 1}
    whole = [
        leaf
        for leaf in leaves
        if rows_of(leaf) > 1 and (not split or rows_of(leaf) in rows)
    ]
    if count == 1 or not whole:
        return False
    these = ", ".join(map(trees.describe, whole[:3]))
    others = "another argument is split" if split else "no argument is split"
    warn(
        f"{name}: each of {count} replicas gets all rows of {these}, while "
        f"{others}. Split them with `keras_conflux.split(batch)`, or draw "
        "batches from `keras_conflux.distribute(dataset)`. If each replica is "
        "to get all rows, say so with `keras_conflux.replicate(array)`."
    )
    return True


def rows_of(tree: Tree) -> int:
    """Returns the largest length of an array's first axis, else 0."""
    arrays = [
        leaf
        for leaf in trees.flatten(tree)
        if isinstance(leaf, np.ndarray | tf.Tensor) and len(leaf.shape)
    ]
    return max((int(leaf.shape[0] or 0) for leaf in arrays), default=0)
