"""The shapes that tensors of a step will have where XLA compiles it.

A step is traced for any number of samples (docs/design/input.md), and XLA
compiles it for one. TensorFlow's own shape functions tell the shape of a
tensor: the operations between the batch and the tensor are copied to a graph
beside the step's, where the batch has the shape for XLA, and which never runs.
"""

from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._graphs import bodies
from keras_conflux._graphs import resources
from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks
from keras_conflux._replication.steps import Part
from keras_conflux._replication.steps import Step

_MAX_ENTRIES = 32
"""How many entries a tensor may have that is taken for a shape."""

ShapeOf: TypeAlias = Callable[[tf.Tensor], Any]
"""Returns the shape of a tensor, as far as it can be told."""


class CompiledShapes(Part):
    """The shapes that tensors of a step will have."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._graph = tf.Graph()
        self._copies: dict[Any, tf.Tensor] = {}
        """By the references of tensors."""
        self._shapes = step.compiled and step.compiled.shapes
        if self._shapes is not None:
            leaves = trees.present(step.shard)
            for leaf, shape in zip(leaves, self._shapes, strict=True):
                self._copies[leaf.ref()] = self._placeholder(leaf, shape)

    def shape_of(self, tensor: tf.Tensor) -> tf.TensorShape:
        """Returns a shape, as far as it can be told."""
        if tensor.shape.is_fully_defined() or self._shapes is None:
            return tensor.shape
        for each in walks.by_need([tensor], self._behind):
            if each.ref() not in self._copies:
                self._copy(each)
        return self._copies[tensor.ref()].shape.merge_with(tensor.shape)

    def _behind(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors on which the shape of one depends."""
        if tensor.ref() in self._copies or _has_one_shape(tensor):
            return []
        outside = bodies.captures(tensor.graph).get(id(tensor))
        if outside is not None:
            return [] if bodies.is_eager(outside) else [outside]
        return [] if _is_opaque(tensor.op) else list(tensor.op.inputs)

    def _copy(self, tensor: tf.Tensor) -> None:
        operation = tensor.op
        outside = bodies.captures(tensor.graph).get(id(tensor))
        value = tf.get_static_value(tensor) if _is_small(tensor) else None
        key = tensor.ref()
        with self._graph.as_default():
            if value is not None:
                self._copies[key] = tf.constant(value, tensor.dtype)
            elif outside is not None and outside.ref() in self._copies:
                self._copies[key] = self._copies[outside.ref()]
            elif _has_one_shape(tensor) or _is_opaque(operation):
                self._copies[key] = self._placeholder(tensor, tensor.shape)
            else:
                self._copy_operation(operation)

    def _copy_operation(self, operation: tf.Operation) -> None:
        inputs = [self._copies[each.ref()] for each in operation.inputs]
        try:
            found = rewriting.copied(operation, inputs)
        except (TypeError, ValueError, tf.errors.OpError):
            # It fits no batch of this shape, which is not said here.
            found = [self._placeholder(x, x.shape) for x in operation.outputs]
        for old, new in zip(operation.outputs, found, strict=True):
            self._copies[old.ref()] = new

    def _placeholder(self, tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        with self._graph.as_default():
            made = tf.compat.v1.placeholder(tensor.dtype, shape)
        if tensor.dtype == tf.resource:
            resources.copy_handle_data(tensor, made)
        return made


def _is_small(tensor: tf.Tensor) -> bool:
    """Whether a tensor may be a shape, or an entry of one."""
    entries = tensor.shape.num_elements()
    is_small = entries is not None and entries <= _MAX_ENTRIES
    return tensor.dtype.is_integer and is_small


def _has_one_shape(tensor: tf.Tensor) -> bool:
    """Whether the shape is known, and nothing else about a tensor matters."""
    return tensor.shape.is_fully_defined() and not _is_small(tensor)


def _is_opaque(operation: tf.Operation) -> bool:
    """Whether an operation's shapes cannot be told from its inputs' shapes."""
    return not operation.inputs or any(
        attribute.WhichOneof("value") == "func"
        for attribute in operation.node_def.attr.values()
    )
