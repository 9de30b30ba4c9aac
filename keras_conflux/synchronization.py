"""Whether the copies of variables are equal, and how to make them so."""

from typing import Any

import numpy as np

from keras_conflux import variables
from keras_conflux.errors import ReplicaMismatchError


def synchronize(target: Any, root: int = 0) -> None:
    """Copies the variables of replica `root` to all others, in place.

    Args:
        target: A replicated model, optimizer, variable, or a list of them.
            A variable with a single copy is left as it is.
        root: The replica whose copies are kept.
    """
    found = _mirrored(target)
    variables.strategy_of(found)
    for variable in found:
        copies = variables.copies(variable)
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
            not compared.
    """
    return _first_difference(target) is None


def assert_in_sync(target: Any) -> None:
    """Raises if `in_sync(target)` is false.

    Raises:
        ReplicaMismatchError: Naming the first variable that differs, the
            replica, and the largest absolute difference.
    """
    difference = _first_difference(target)
    if difference is not None:
        raise ReplicaMismatchError(difference)


def _first_difference(target: Any) -> str | None:
    for variable in _mirrored(target):
        first, *others = (copy.numpy() for copy in variables.copies(variable))
        for index, other in enumerate(others, start=1):
            if first.tobytes() != other.tobytes():
                gap = np.abs(other.astype("float64") - first.astype("float64"))
                return (
                    f"{variables.name_of(variable)} differs between replica 0 "
                    f"and replica {index}, by up to {gap.max():.3g}. Copy one "
                    "replica's values to all with "
                    "`keras_conflux.synchronize`."
                )
    return None


def _mirrored(target: Any) -> list[Any]:
    return [
        variable
        for variable in variables.variables_of(target)
        if variables.is_mirrored(variable)
    ]
