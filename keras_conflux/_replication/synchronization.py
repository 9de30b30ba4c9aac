"""Whether the copies of variables are equal, and how to make them so."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._replication import state
from keras_conflux._replication.replicas import Replicas


def synchronize(target: Any, root: int = 0) -> None:
    """Copies the variables of replica `root` to all others, in place.

    Args:
        target: A replicated model, optimizer, variable, or a list of them.
            A variable with a single copy is left as it is.
        root: The replica whose copies are kept.
    """
    found = _mirrored(target, "synchronize")
    state.strategy_of(found)
    for variable in found:
        copies = state.copies(variable)
        if root not in range(len(copies)):
            raise ValueError(
                "`root` is the index of a replica, from 0 to "
                f"{len(copies) - 1}. Received: {root}."
            )
        value = copies[root].read_value()
        for copy in copies:
            copy.assign(value)


def in_sync(target: Any) -> bool:
    """Whether all copies of each variable are equal bit by bit.

    Args:
        target: A replicated model, optimizer, variable, or a list of them.
            The copies of a metric, which are added up when it is read, are
            not compared. Or a `Replicas`, such as the gradients that replicas
            are about to apply: its trees are compared.
    """
    return _first_difference(target) is None


def assert_in_sync(target: Any) -> None:
    """Raises if `in_sync(target)` is false.

    Args:
        target: See `in_sync`.

    Raises:
        ReplicaMismatchError: Naming the first variable or leaf that differs,
            the replica, and the largest absolute difference.
    """
    difference = _first_difference(target)
    if difference is not None:
        raise ReplicaMismatchError(difference)


def _first_difference(target: Any) -> str | None:
    if isinstance(target, Replicas):
        return _first_difference_of_trees(target)
    for variable in _mirrored(target, "in_sync"):
        copies = [copy.numpy() for copy in state.copies(variable)]
        difference = _difference(state.name_of(variable), copies)
        if difference is not None:
            return (
                f"{difference} Copy one replica's values to all with "
                "`keras_conflux.synchronize`."
            )
    return None


def _first_difference_of_trees(replicas: Replicas) -> str | None:
    tensors = [
        trees.map_leaves(tf.convert_to_tensor, tree) for tree in replicas
    ]
    try:
        trees.assert_alike(dict(enumerate(tensors)), "assert_in_sync")
    except ReplicaMismatchError as error:
        return str(error)
    for path, *leaves in zip(
        trees.paths(replicas[0]), *map(trees.flatten, tensors), strict=True
    ):
        if leaves[0] is None:
            continue
        difference = _difference(path, [leaf.numpy() for leaf in leaves])
        if difference is not None:
            return f"{difference} Reduce it with `keras_conflux.allreduce`."
    return None


def _difference(name: str, copies: Sequence[np.ndarray]) -> str | None:
    first, *others = copies
    for index, other in enumerate(others, start=1):
        if first.tobytes() != other.tobytes():
            gap = np.abs(other.astype("float64") - first.astype("float64"))
            return (
                f"{name} differs between replica 0 and replica {index}, by up "
                f"to {gap.max():.3g}."
            )
    return None


def _mirrored(target: Any, call: str) -> list[Any]:
    state.assert_known(target, call)
    return [
        variable
        for variable in state.variables_of(target)
        if state.is_mirrored(variable)
    ]
