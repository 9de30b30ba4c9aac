"""The arguments of a call, split or not, and each replica's part of them.

A function that runs on every device keeps its parameters, except that each of
them also takes a `Replicas`. Python has no such `ParamSpec`. So a call whose
first or second positional argument is a `Replicas` is accepted with any others,
and all other calls are checked as calls of the plain function are.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any
from typing import Concatenate
from typing import Literal
from typing import ParamSpec
from typing import Protocol
from typing import TypeAlias
from typing import TypeVar
from typing import overload

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._fit.input import specs
from keras_conflux._graphs import resources
from keras_conflux._replication import state
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.replicas import as_replicas
from keras_conflux._replication.steps import Step

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_Instance = TypeVar("_Instance", contravariant=True)
_Others = ParamSpec("_Others")
_ARRAYS = (tf.Tensor, np.ndarray)


class PerDeviceCall(Protocol[P, R_co]):
    """A function of parameters `P` as it can be called."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self, first: Replicas[Any], /, *args: Any, **kwargs: Any
    ) -> R_co: ...
    @overload
    def __call__(
        self, first: Any, second: Replicas[Any], /, *args: Any, **kwargs: Any
    ) -> R_co: ...


class PerDeviceFunction(PerDeviceCall[P, R_co], Protocol[P, R_co]):
    """A function of parameters `P`, or a method, that runs on every device."""

    def __get__(
        self: "PerDeviceFunction[Concatenate[_Instance, _Others], R_co]",
        instance: _Instance,
        owner: Any = None,
    ) -> "PerDeviceFunction[_Others, R_co]": ...


class Decorator(Protocol):
    """The decorator that `withdevices` returns if it is given options only."""

    def __call__(
        self, fn: Callable[P, R], /
    ) -> PerDeviceFunction[P, Replicas[R]]: ...


Kind: TypeAlias = Literal["own", "shared", "reduced"] | int
"""Whether replicas have parts of an argument, all the same, or equal values
that a collective has returned. A number is the rank of the only replica that
has what a collective has returned, and others have parts."""


class Given:
    """Arguments, some of them split, as `Replicas` and their kin are."""

    def __init__(self, arguments: Tree) -> None:
        self._arguments = arguments
        self._leaves = [*map(as_replicas, keras.tree.flatten(arguments))]
        self.split = [x for x in self._leaves if isinstance(x, Replicas)]
        """The arguments that give each replica a part."""

    def parts(self, count: int) -> list[Tree]:
        """Returns the arguments of each of some replicas."""
        return [self._of(index) for index in range(count)]

    def _of(self, index: int) -> Tree:
        own = [x[index] if isinstance(x, Replicas) else x for x in self._leaves]
        return keras.tree.pack_sequence_as(self._arguments, own)

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each leaf that a replica gets."""
        found: list[Kind] = []
        for leaf in self._leaves:
            if isinstance(leaf, Replicas):
                found.extend(leaf.kind for _ in keras.tree.flatten(leaf[0]))
            else:
                found.append("shared")
        return tuple(found)

    def signature(self, parts: list[Tree]) -> tuple[Any, ...]:
        """Returns the properties of all parts that a trace depends on.

        If some are no tensors, it depends on more. TensorFlow finds out.
        """
        structure = keras.tree.map_structure(lambda _: None, parts)
        found: list[Any] = [repr(structure), self.kinds]
        for leaf in keras.tree.flatten(parts):
            found.append(type(leaf))
            if isinstance(leaf, _ARRAYS):
                found.extend((leaf.dtype, leaf.shape))
        return tuple(found)

    @property
    def is_uneven(self) -> bool:
        """Whether something is said to be of batches of different sizes."""
        return any(leaf.is_uneven for leaf in self.split)

    @property
    def empty(self) -> list[int]:
        """The indices of replicas with parts that have no samples."""
        return [
            index
            for index, own in enumerate(zip(*self.split, strict=True))
            if any(0 in getattr(x, "shape", ())[:1] for x in trees.flatten(own))
        ]

    def opened(self, parts: list[Tree]) -> Any:
        """Returns all parts with any number of rows, to trace for.

        Keras returns a loss per sample where it knows that there is none.
        """
        if not self.empty:
            return parts
        kinds = iter(self.kinds * len(parts))

        def open_(leaf: Any) -> Any:
            is_own = next(kinds) == "own" and isinstance(leaf, _ARRAYS)
            return specs.spec_of_any(leaf) if is_own else leaf

        return keras.tree.map_structure(open_, parts)

    def warn_of_mean(self, name: str, is_weighted: bool) -> bool:
        """Warns of a mean over uneven parts, and tells if it has."""
        differ = self.is_uneven or any(
            len({*map(rows_of, leaf)}) > 1 for leaf in self.split
        )
        if differ and is_weighted:
            warn(
                f"{name}: the parts of the batch have different numbers of "
                "samples, and `allreduce('mean', ..., weight=...)` reduces "
                "gradients that have passed through a collective, which adds "
                "up losses without weights. Differentiate `loss * share`, with "
                "`share = len(x) / keras_conflux.allreduce('sum', len(x))` as "
                "a number of the loss' dtype, and reduce the gradients by "
                "`keras_conflux.allreduce('sum', gradients)`."
            )
        elif differ:
            warn(
                f"{name}: a mean counts all replicas alike, and their parts of "
                "the batch have different numbers of samples, so it is not the "
                "mean over samples. Where `x` is the replica's part, write "
                "`keras_conflux.allreduce('mean', ..., weight=len(x))`, and "
                "`metric.update_state(loss, sample_weight=len(x))`; outside of "
                "replicas `weight=[len(part) for part in x]`. Or draw batches "
                "that the number of replicas divides."
            )
        return differ


def warn_if_unsplit(name: str, count: int, arguments: Tree) -> bool:
    """Warns of arrays that go to all replicas as they are, and look like rows.

    Beside a split argument they have as many rows as it. Otherwise all of an
    argument have as many, unlike gradients. Tells if it has warned.
    """
    leaves = trees.flatten(arguments)
    split = [leaf for leaf in leaves if isinstance(leaf, Replicas)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Replicas)]
    if any(isinstance(x, tf.distribute.DistributedValues) for x in others):
        return False  # and variables, of which each replica has its own
    rows = {sum(map(rows_of, parts)) for parts in split if len(parts) > 1}
    args, kwargs = arguments
    each = [*map(trees.flatten, (*args, *kwargs.values()))]
    alike = [some for some in each if len({*map(rows_of, some)} - {0}) == 1]
    whole = [
        leaf
        for leaf in (leaves if split else itertools.chain(*alike))
        if rows_of(leaf) > 1 and (not split or rows_of(leaf) in rows)
    ]
    if count == 1 or not whole:
        return False
    these = ", ".join(map(trees.describe, whole[:3]))
    others = "another argument is split" if split else "no argument is split"
    own = if_own = ""
    if process_count() > 1:
        own = "its process' "
        if_own = " A process with one replica, and rows of its own, writes "
        if_own += "`keras_conflux.Replicas([array], devices=1)`."
    warn(
        f"{name}: each of {count} replicas gets all rows of {own}{these}, "
        f"while {others}. Split them with `keras_conflux.split(batch)`, or "
        "draw batches from `keras_conflux.distribute(dataset)`. If each "
        "replica is to get all rows, say so with "
        f"`keras_conflux.replicate(array)`.{if_own}"
    )
    return True


def warn_of_numbers(name: str, traces: int, arguments: Tree) -> None:
    """Warns of a step that is traced for each number of Python that it gets."""
    leaves = keras.tree.flatten(arguments)
    numbers = [each for each in leaves if type(each) in (int, float)]
    if traces == 5 and numbers:
        warn(
            f"{name}: each number of Python has the step traced anew, which "
            f"takes long: it was 5 times by now. In place of {numbers[0]!r}, "
            f"write `tf.constant({numbers[0]!r})`."
        )


def warn_of_returned_sums(step: Step, made_of: list[Any]) -> None:
    """Warns where results are made of a copy of what copies add up to."""
    for each in made_of:
        variable = resources.container_of(each)
        if variable is not None and state.is_sum(variable):
            step.warn_once(
                "returned sums",
                f"the step returns what it has read of {variable.name!r}. In "
                "a replica it counts the samples of this replica alone, as in "
                "the result of a metric. Read it after the step: outside of "
                "replicas, `metric.result()` is of all samples.",
            )


def are_tensors(tree: Tree) -> bool:
    """Whether all leaves of a tree are tensors or arrays."""
    return all(isinstance(leaf, _ARRAYS) for leaf in keras.tree.flatten(tree))


def rows_of(tree: Tree) -> int:
    """Returns the largest length of an array's first axis, else 0."""
    sizes = [
        int(leaf.shape[0] or 0)
        for leaf in trees.flatten(tree)
        if isinstance(leaf, _ARRAYS) and len(leaf.shape)
    ]
    return max(sizes, default=0)
