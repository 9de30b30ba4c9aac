"""Traces what calls put into a graph, on rows of samples of open number."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import ROW_SPLITS
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows

SPECS = {
    "floats": ((4,), "float32"),
    "column": ((1,), "float32"),
    "vector": ((), "float32"),
    "steps": ((6, 4), "float32"),
    "matrices": ((4, 4), "float32"),
    "images": ((8, 8, 3), "float32"),
    "volumes": ((4, 4, 4, 3), "float32"),
    "films": ((3, 8, 8, 3), "float32"),
    "doubles": ((4,), "float64"),
    "ints": ((4,), "int32"),
    "bytes": ((4,), "uint8"),
    "labels": ((), "int32"),
    "tokens": ((6,), "int32"),
    "longs": ((4,), "int64"),
    "bools": ((4,), "bool"),
    "strings": ((), "string"),
    "words": ((4,), "string"),
    "complex": ((4,), "complex64"),
    "complex matrices": ((4, 4), "complex64"),
    "complex images": ((4, 8, 8), "complex64"),
    "waves": ((64,), "float32"),
    "tunes": ((64, 1), "float32"),
    "scenes": ((2, 4, 4, 4, 2), "float32"),
    "boxes": ((2, 4), "float32"),
}
"""The shape of a sample, and the dtype."""


class Leaves:
    """Makes the leaves of a batch in the graph that is being traced.

    Args:
        kinds: Gets to know what they are.
    """

    def __init__(self, kinds: KindInference) -> None:
        self._kinds = kinds
        self.watched: list[tf.Tensor] = []

    def __call__(self, name: str) -> Any:
        """Returns a new leaf of the name of a spec, or a composite one."""
        if name == "ragged":
            return self._ragged()
        if name.startswith("sparse"):
            return self._sparse("int64" if "longs" in name else "float32")
        shape, dtype = SPECS[name]
        return self._placeholder((None, *shape), dtype, rows(0))

    def __getattr__(self, name: str) -> Any:
        return self(name.replace("_", " "))

    def _placeholder(self, shape: tuple, dtype: str, kind: Kind) -> tf.Tensor:
        leaf = tf.compat.v1.placeholder(dtype, shape)
        self._kinds.mark(leaf, kind)
        self.watched.append(leaf)
        return leaf

    def _ragged(self) -> tf.RaggedTensor:
        regular = rows(0, regular=False)
        values = self._placeholder((None,), "float32", regular)
        splits = self._placeholder((None,), "int64", ROW_SPLITS)
        return tf.RaggedTensor.from_row_splits(values, splits, validate=False)

    def _sparse(self, dtype: str) -> tf.SparseTensor:
        parts = (((None, 2), "int64"), ((None,), dtype), ((2,), "int64"))
        found = [self._placeholder(*part, OPAQUE) for part in parts]
        return tf.SparseTensor(*found)


class Values:
    """Makes the same leaves with values, for what has to run once."""

    def __call__(self, name: str) -> Any:
        if name == "ragged":
            return tf.ragged.constant([[0.1], [0.2, 0.3]])
        if name == "sparse":
            return tf.sparse.from_dense([[0.1, 0.0], [0.2, 0.3]])
        shape, dtype = SPECS[name]
        if dtype == "string":
            return tf.fill((2, *shape), "a")
        drawn = np.random.default_rng(0).uniform(0.1, 0.9, (2, *shape))
        return tf.cast(drawn, dtype)

    def __getattr__(self, name: str) -> Any:
        return self(name.replace("_", " "))


@dataclasses.dataclass
class Trace:
    """What a call has put into a graph.

    Args:
        graph: It.
        kinds: Of its tensors.
    """

    graph: Any
    kinds: KindInference

    def types(self) -> set[str]:
        """Returns the types of the operations, those in functions too."""
        definition = self.graph.as_graph_def()
        found = {node.op for node in definition.node}
        names = {each.signature.name for each in definition.library.function}
        for function in definition.library.function:
            found |= {node.op for node in function.node_def}
        return found - names

    def derived(self) -> list[tf.Operation]:
        """Returns the operations that make what is DERIVED, or not known.

        Their inputs are neither.
        """
        return [
            operation
            for operation in self.graph.get_operations()
            if operation.outputs
            and any(map(self._is_derived, operation.outputs))
            and not any(map(self._is_derived, operation.inputs))
        ]

    def _is_derived(self, tensor: tf.Tensor) -> bool:
        kind = self.kinds.of(tensor)
        return kind.mixed or kind.role in (Role.DERIVED, Role.OPAQUE)


def traced(
    call: Callable[[Any], Any], variables: tuple = (), sums: tuple = ()
) -> Trace:
    """Traces a call, and the gradients of what it returns.

    Args:
        call: Takes `Leaves`.
        variables: By which is differentiated, beside the leaves.
        sums: Variables whose copies add up to their value.
    """
    graph = tf.__internal__.FuncGraph("known")
    kinds = KindInference(
        [], [], lambda x: any(x is each.handle for each in sums)
    )
    with graph.as_default():
        leaves = Leaves(kinds)
        with tf.GradientTape() as tape:
            found = call(_Watching(leaves, tape))
            targets = [x for x in _tensors(found) if _has_slope(x)]
        sources = [*filter(_has_slope, leaves.watched), *variables]
        # Of what has none, what precedes it is in the graph.
        with contextlib.suppress(Exception):
            tape.gradient(targets, sources)
    return Trace(graph, kinds)


class _Watching:
    """Watches the leaves that a call asks for."""

    def __init__(self, leaves: Leaves, tape: tf.GradientTape) -> None:
        self._leaves, self._tape = leaves, tape

    def __call__(self, name: str) -> Any:
        before = len(self._leaves.watched)
        leaf = self._leaves(name)
        for each in self._leaves.watched[before:]:
            if _has_slope(each):
                self._tape.watch(each)
        return leaf

    def __getattr__(self, name: str) -> Any:
        return self(name.replace("_", " "))


def _tensors(found: Any) -> list[Any]:
    flat = tf.nest.flatten(found, expand_composites=True)
    flat = [x.value if isinstance(x, keras.Variable) else x for x in flat]
    return [each for each in flat if tf.is_tensor(each)]


def _has_slope(tensor: Any) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
