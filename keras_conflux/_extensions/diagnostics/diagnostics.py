"""Statistics of a tree or a model, by leaf, and whether it is finite."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from typing import overload

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replicas import Replicas


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of one leaf's numbers, as `statistics` finds them.

    `mean`, `std`, `min` and `max` are of its finite numbers, computed in
    float64, and NaN if there are none. As text it is one line.

    Example:
        ```python
        (found,) = kc.statistics({"loss": np.array([1.0, 3.0, np.nan])})
        print(found.path, found.mean, found.nans)  # ['loss'] 2.0 1
        print(found)
        ```
    """

    path: str
    """Where the leaf is: the path of a variable, else the keys of the tree."""
    leaf: str
    """Its dtype and shape, such as `float32(3, 4)`."""
    mean: float
    """The mean of its finite numbers."""
    std: float
    """Their standard deviation, with the number of them as the divisor."""
    min: float
    """The smallest of them."""
    max: float
    """The largest of them."""
    nans: int
    """How many of its numbers are NaN."""
    infs: int
    """How many of its numbers are infinite."""

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.leaf}, mean {self.mean:.3g}, std "
            f"{self.std:.3g}, min {self.min:.3g}, max {self.max:.3g}, "
            f"{self.nans} NaN, {self.infs} infinite"
        )


@overload
def statistics(target: keras.layers.Layer) -> list[Statistics]: ...
@overload
def statistics(target: Replicas[Any]) -> Replicas[list[Statistics]]: ...
@overload
def statistics(target: Any) -> list[Statistics]: ...
def statistics(target: Any) -> Any:
    """Returns the `Statistics` of each leaf: mean, range, NaN and the like.

    FluxDistributed.jl has such statistics of a tree.

    Args:
        target: A Keras model, layer, optimizer, metric or variable, or a tree
            of these and of numeric arrays, such as gradients. A replicated
            variable counts with the value that it has outside of replicas:
            replica 0's copy, or of a metric the sum of the copies. `None`
            leaves have no statistics, and sparse tensors count by the values
            that they store.

    Returns:
        A list of `Statistics`, one per leaf. Of a `Replicas`, one of lists.

    Raises:
        TypeError: If a leaf is not made of real numbers.
        ValueError: Inside a step, where no number is known yet.

    Example:
        ```python
        model = kc.replicate(build_model())
        for each in kc.statistics(model):
            print(each)
        ```
    """
    if not tf.executing_eagerly():
        raise ValueError(
            "`statistics` needs numbers, which a step that is being traced "
            "does not have yet. Return the tensors of interest from the "
            "step, and call it on these."
        )
    if isinstance(target, Replicas):
        return Replicas([statistics(each) for each in target], target.devices)
    return [_statistics(path, leaf) for path, leaf in _leaves(target)]


@tf.autograph.experimental.do_not_convert
def assert_finite(target: Any) -> None:
    """Raises an error if a number is NaN or infinite.

    Inside a step this puts a check into the step, which raises
    `tf.errors.InvalidArgumentError` when it runs. Give it there tensors that
    all replicas have alike, such as gradients after `allreduce`: a NaN of any
    replica is in them, and all replicas raise together. On GPUs a replica that
    fails alone leaves others waiting in their next collective. XLA leaves such
    checks out.

    Args:
        target: A Keras model, layer, optimizer, metric or variable, a tree of
            these and of numeric arrays, such as gradients, or a `Replicas`.
            Of a replicated variable, each copy is checked. `None` leaves, and
            leaves that are not of floating point, are always finite.

    Raises:
        FloatingPointError: Naming the first leaf that is not finite, the
            replica, and how many of its numbers are NaN and infinite.
        TypeError: If a leaf cannot become a tensor.
        tf.errors.InvalidArgumentError: Instead of `FloatingPointError`, when
            a step runs that the check is part of.

    Example:
        ```python
        model = kc.replicate(build_model())
        kc.assert_finite(model)

        @kc.withdevices
        def checked(gradients):
            kc.assert_finite(kc.allreduce("sum", gradients))
        ```
    """
    for where, leaf in _places(target):
        numbers = _numbers(where, leaf)
        if not numbers.dtype.is_floating:
            continue
        if not tf.executing_eagerly():
            tf.debugging.check_numerics(numbers, f"{where} is not finite")
        elif not tf.reduce_all(tf.math.is_finite(numbers)):
            nans = int(tf.math.count_nonzero(tf.math.is_nan(numbers)))
            infs = int(tf.math.count_nonzero(tf.math.is_inf(numbers)))
            raise FloatingPointError(
                f"{where} is not finite: of {int(tf.size(numbers))} numbers "
                f"{nans} are NaN and {infs} infinite."
            )


def _places(target: Any) -> Iterator[tuple[str, Any]]:
    """Yields where each leaf is, its replica included, and the leaf."""
    if isinstance(target, Replicas):
        for index, tree in enumerate(target):
            for path, leaf in _leaves(tree):
                yield f"{path} on replica {index}", leaf
        return
    for path, leaf in _leaves(target):
        copies = state.copies(leaf)
        for index, copy in enumerate(copies):
            if not in_replica():
                several = len(copies) > 1
                yield f"{path} on replica {index}" if several else path, copy
            elif len(copies) == 1 or index == replica_index():
                yield f"{path} on replica {replica_index()}", copy


def _leaves(target: Any) -> Iterator[tuple[str, Any]]:
    """Yields each leaf behind its path, models and such by their variables."""
    for path, leaf in trees.with_paths(target):
        if isinstance(leaf, state.Replicable):
            for variable in state.variables_of(leaf):
                yield state.name_of(variable), variable
        elif isinstance(leaf, keras.Variable | tf.Variable):
            yield state.name_of(leaf), leaf
        elif leaf is not None:
            yield path, leaf


def _numbers(where: str, leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.IndexedSlices | tf.SparseTensor):
        leaf = leaf.values
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.flat_values
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The leaf at {where} is a {type(leaf).__name__}, not something "
            "numeric. Leave it out of the tree, or put None."
        ) from error


def _statistics(path: str, leaf: Any) -> Statistics:
    numbers = _numbers(path, leaf)
    if numbers.dtype.is_complex or numbers.dtype == tf.string:
        raise TypeError(
            f"Received: {path} is {numbers.dtype.name}. Statistics are of "
            "real numbers: leave it out of the tree, or put None."
        )
    values = numbers.numpy().astype("float64")
    finite = values[np.isfinite(values)]
    if not finite.size:
        finite = np.array([np.nan])
    return Statistics(
        path=path,
        leaf=trees.describe(numbers),
        mean=float(finite.mean()),
        std=float(finite.std()),
        min=float(finite.min()),
        max=float(finite.max()),
        nans=int(np.isnan(values).sum()),
        infs=int(np.isinf(values).sum()),
    )
