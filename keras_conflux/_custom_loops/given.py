"""The arguments of a call, and each replica's part of them."""

import functools
from typing import Any
from typing import Literal
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._custom_loops.unsplit import rows_of
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.replicas import as_replicas

Kind: TypeAlias = Literal["own", "shared", "reduced"] | int
"""Whether replicas have parts of an argument, all the same, or equal values
that a collective has returned. A number is the rank of the only replica that
has what a collective has returned, and others have parts."""


class Given:
    """Arguments, some of them split.

    Args:
        arguments: A tree. Its leaves that are `Replicas` or values of
            `tf.distribute` give each replica its own part, all others go to
            every replica.
    """

    def __init__(self, arguments: Tree) -> None:
        self._arguments = arguments
        self._leaves = [
            as_replicas(leaf) for leaf in keras.tree.flatten(arguments)
        ]
        self.split = [x for x in self._leaves if isinstance(x, Replicas)]
        """The arguments that give each replica a part."""

    def of(self, index: int) -> Tree:
        """Returns the arguments of a replica."""
        own = [
            leaf[index] if isinstance(leaf, Replicas) else leaf
            for leaf in self._leaves
        ]
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

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """The properties of the leaves that a trace depends on.

        Where there are more, TensorFlow finds out.
        """
        found: list[Any] = [self.kinds]
        for leaf in self._leaves:
            parts = leaf.values if isinstance(leaf, Replicas) else (leaf,)
            for part in parts:
                is_array = isinstance(part, tf.Tensor | np.ndarray)
                found.append(
                    (type(part), part.dtype, part.shape)
                    if is_array
                    else type(part)
                )
        return tuple(found)

    @property
    def is_uneven(self) -> bool:
        """Whether something is said to be of batches of different sizes."""
        return any(leaf.is_uneven for leaf in self.split)

    def warn_of_mean(self, name: str) -> bool:
        """Warns of a mean over parts of different sizes, and tells if it has.

        Args:
            name: The function that takes the mean.
        """
        differ = self.is_uneven or any(
            len({*map(rows_of, leaf)}) > 1 for leaf in self.split
        )
        if differ:
            warn(
                f"{name}: `allreduce('mean', ...)` counts all replicas alike, "
                "and their parts of the batch have different numbers of "
                "samples, so it is not the mean over samples. Write "
                "`keras_conflux.allreduce('mean', ..., weight=len(x))`, where "
                "`x` is the replica's part, or draw batches that the number "
                "of replicas divides."
            )
        return differ
