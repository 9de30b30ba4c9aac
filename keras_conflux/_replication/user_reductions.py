"""The values that a program has reduced by itself in a step."""

from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._replication.steps import Part
from keras_conflux._replication.steps import Step


class UserReductions(Part):
    """The results of the user's own collectives in a step."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._leaves: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def add(self, tree: Tree) -> None:
        """Notes the result of one."""
        self._leaves.extend(trees.flatten(tree))

    def operations(self) -> list[tf.Operation]:
        """Returns the operations that make it."""
        return operations_of(self._leaves)


def operations_of(leaves: list[Any]) -> list[tf.Operation]:
    """Returns the operations that make tensors, which may be sparse."""
    values = [
        leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf
        for leaf in leaves
    ]
    return [value.op for value in values if tf.is_symbolic_tensor(value)]
