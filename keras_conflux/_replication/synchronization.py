"""Whether the copies of variables are equal, and how to make them so."""

import math
import zlib
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._common import arguments
from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._communication.buckets import neighbours
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._replication import state
from keras_conflux._replication.across_processes import run_everywhere
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import is_replicated


def synchronize(target: Any, root: int = 0) -> None:
    """Copies the variables of replica `root` to all others, in place.

    This makes copies equal that have come apart, as with updates that were
    not reduced. Lux.jl and Conflux.jl synchronize in this way.

    Args:
        target: A replicated model, layer, optimizer, metric or variable, or a
            tree of them. A variable with a single copy is left as it is, and
            so are the copies of a metric, which are added when it is read, and
            the parts of variables that `shard` has cut.
        root: The index of the replica whose copies are kept, from 0.

    Raises:
        StrategyError: If variables belong to several strategies, or to a
            strategy that is not a `ReplicatedStrategy`.
        TypeError: If there is something else in `target`.
        ValueError: If there is no replica `root`, or if it is not 0 and has
            only parts of some variables.

    Example:
        ```python
        model = kc.replicate(build_model())
        kc.synchronize(model)
        assert kc.in_sync(model)
        ```
    """
    found = _mirrored(target, "synchronize")
    _refuse_parts(target, root)
    strategy = state.strategy_of(found)
    if strategy is not None and strategy.communicator.spans_processes:
        _copy_to_all(found, strategy, root)
        return
    for variable in found:
        copies = state.copies(variable)
        arguments.assert_root(root, len(copies))
        if tf.executing_eagerly() and not copies[root].is_initialized():
            continue  # the function that made it has failed
        value = copies[root].read_value()
        for copy in copies:
            copy.assign(value)


def _copy_to_all(
    variables: list[keras.Variable], strategy: ReplicatedStrategy, root: int
) -> None:
    """Copies the variables of one replica to the replicas of all processes."""
    arguments.assert_root(root, strategy.communicator.size)
    replicated = [v for v in variables if is_replicated(state.backing(v))]
    name = f"synchronize of {len(replicated)} variables"
    listed = [(state.name_of(v), tuple(v.shape), v.dtype) for v in replicated]
    with errors_reported_to_all(name):
        assert_same_place(f"{name}: {listed}")
        for group in neighbours(replicated, trees.bytes_of, BYTES_AT_ONCE):
            _copy_group(group, strategy, root, name)


BYTES_AT_ONCE = 2**28
"""The size of one message. A copy takes several times its size meanwhile."""


def _copy_group(
    group: list[Any], strategy: ReplicatedStrategy, root: int, name: str
) -> None:
    """Copies variables, a part of the rows at a time if there is one."""
    copies = list(zip(*map(state.copies, group), strict=True))
    rows = next(iter(group[0].shape), 1)
    needed = math.ceil(sum(map(trees.bytes_of, group)) / BYTES_AT_ONCE)
    parts = max(1, min(rows, needed))  # several variables are one part
    length = math.ceil(rows / parts)

    def one_replica(first: tf.Tensor) -> None:
        mine, this = copies[replica_index()], replica_collectives()
        if parts == 1:
            values = this.broadcast([copy.read_value() for copy in mine], root)
            for copy, value in zip(mine, values, strict=True):
                copy.assign(value)
        else:
            copy: Any = mine[0]
            value = copy[first : first + length]
            value = tf.ensure_shape(value, [length, *copy.shape[1:]])
            value = this.broadcast(value, root)
            copy[first : first + length].assign(value)

    one_replica.__qualname__ = name
    run = run_everywhere(one_replica, strategy)
    for part in range(parts):
        first = min(part * length, rows - length)  # the last ones may overlap
        run(tf.constant(first))


def in_sync(target: Any) -> bool:
    """Returns whether all copies of each variable are equal bit by bit.

    The values are compared on the host, so call it between steps only.

    Args:
        target: A replicated model, layer, optimizer, metric or variable, or a
            tree of them. The copies of a metric, which are added up when it
            is read, are not compared. Or a `Replicas`, such as the gradients
            that replicas are about to apply: its trees are compared.

    Returns:
        `True` if they are equal, or if there is nothing to compare.

    Raises:
        NotImplementedError: Inside of a replica, where no value is known yet.
        TypeError: If there is something else in `target`.
        ValueError: If a leaf of a `Replicas` cannot become a tensor.

    Example:
        ```python
        model = kc.replicate(build_model())
        assert kc.in_sync(model)
        assert not kc.in_sync(kc.Replicas([1.0, 2.0], devices=2))
        ```
    """
    return _first_difference(target, "in_sync") is None


def assert_in_sync(target: Any) -> None:
    """Raises an error unless all copies of each variable are equal.

    It compares the same variables as `in_sync`, and names the difference.
    FluxDistributed.jl checks its replicas in this way.

    Args:
        target: A replicated model, layer, optimizer, metric or variable, or a
            tree of them; or a `Replicas`. See `in_sync`.

    Raises:
        NotImplementedError: Inside of a replica, where no value is known yet.
        ReplicaMismatchError: If copies differ, naming the first variable or
            leaf that does, the replica, and the largest absolute difference.
        TypeError: If there is something else in `target`.
        ValueError: If a leaf of a `Replicas` cannot become a tensor.

    Example:
        ```python
        gradients = kc.Replicas([[1.0], [1.5]], devices=2)
        try:
            kc.assert_in_sync(gradients)
        except kc.ReplicaMismatchError as error:
            print(error)  # [0] differs between ..., by up to 0.5.
        ```
    """
    difference = _first_difference(target, "assert_in_sync")
    if difference is not None:
        raise ReplicaMismatchError(difference)


def _first_difference(target: Any, call: str) -> str | None:
    if isinstance(target, Replicas):
        return _first_difference_of_trees(target)
    found = _mirrored(target, call)
    difference = _difference(
        (state.name_of(x), [y.numpy() for y in state.copies(x)]) for x in found
    )
    if process_count() > 1:
        difference = _first_difference_anywhere(found, difference)
    return difference and (
        f"{difference} Copy one replica's values to all with "
        "`keras_conflux.synchronize`."
    )


def _first_difference_anywhere(
    variables: list[keras.Variable], here: str | None
) -> str | None:
    """Compares checksums of all processes, which get the same answer."""
    with errors_reported_to_all("in_sync"):
        values = [state.copies(v)[0].numpy().tobytes() for v in variables]
        own = [here is not None, *map(zlib.crc32, values)]
        told = all_gather_json(f"in_sync of {len(values)} variables", own)
    apart, *checksums = zip(*told, strict=True)
    if any(apart):
        return here or f"Copies differ in process {apart.index(True)}."
    for variable, sums in zip(variables, checksums, strict=True):
        others = [i for i, each in enumerate(sums) if each != sums[0]]
        if others:
            return (
                f"{state.name_of(variable)} differs between process 0 and "
                f"process {others[0]}."
            )
    return None


def _first_difference_of_trees(replicas: Replicas[Any]) -> str | None:
    tensors = [trees.map_leaves(tf.convert_to_tensor, x) for x in replicas]
    try:
        trees.assert_alike(dict(enumerate(tensors)), "assert_in_sync")
    except ReplicaMismatchError as error:
        return str(error)
    paths = trees.paths(replicas[0])
    pairs = zip(paths, *map(trees.flatten, tensors), strict=True)
    difference = _difference(
        (path, [leaf.numpy() for leaf in leaves])
        for path, *leaves in pairs
        if leaves[0] is not None
    )
    return difference and (
        f"{difference} Reduce it with `keras_conflux.allreduce`."
    )


def _difference(values: Iterable[tuple[str, Sequence[Any]]]) -> str | None:
    """Describes the first value of which replicas have different copies."""
    for name, (first, *others) in values:
        for index, other in enumerate(others, start=1):
            if first.tobytes() != other.tobytes():
                gap = np.abs(other.astype("float64") - first.astype("float64"))
                return (
                    f"{name} differs between replica 0 and replica {index}, by "
                    f"up to {gap.max():.3g}."
                )
    return None


def _mirrored(target: Any, call: str) -> list[Any]:
    state.assert_known(target, call)
    return [
        variable
        for variable in state.variables_of(target)
        if state.is_mirrored(variable) and not state.is_in_parts(variable)
    ]


def _refuse_parts(target: Any, root: int) -> None:
    """Raises if a replica is to give others variables that are cut."""
    if root == 0:
        return
    for variable in state.variables_of(target):
        if state.is_in_parts(variable):
            raise ValueError(
                f"`synchronize(..., root={root})` copies one replica's "
                f"variables to others, but {state.name_of(variable)} is "
                "sharded. Leave out `root` to copy only variables that have "
                "copies, or call `keras_conflux.unreplicate` first."
            )
