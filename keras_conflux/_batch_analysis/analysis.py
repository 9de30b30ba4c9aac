"""Tells the kind of each tensor of a replica's step, from its graph."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import control_flow
from keras_conflux._batch_analysis import reductions
from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.kinds import COUNT
from keras_conflux._batch_analysis.kinds import COUNTED
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import ROW_SPLITS
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows
from keras_conflux._graphs import bodies
from keras_conflux._graphs import effects
from keras_conflux._graphs import walks


class KindInference:
    """The kinds of the tensors of one replica's step.

    Args:
        shard: The leaves of the replica's shard of the batch, whose first axis
            is the axis of the samples.
        counts: Tensors that are numbers of samples, or fractions of them.
        is_sum: Whether a handle is of a variable whose copies add up to its
            value, such as a count of a metric.
        is_blind: Whether only marked tensors are known.
    """

    def __init__(
        self,
        shard: list[Any],
        counts: list[tf.Tensor],
        is_sum: Callable[[Any], bool],
        is_blind: bool = False,
    ) -> None:
        self.is_blind = is_blind
        self.graph: Any = tf.compat.v1.get_default_graph()
        """The graph of the step."""
        self.samples = [part for leaf in shard for part in parts_of(leaf)]
        """The tensors of the replica's shard of the batch."""
        self._marked: dict[int, tuple[tf.Tensor, Kind]] = {}
        self.tried: dict[int, tf.Tensor] = {}
        """By id, the tensors that have been tried out, whatever was found."""
        self._graphs: dict[int, _GraphReader] = {}
        self.is_sum = is_sum
        self.merged: list[tf.Tensor] = []
        """The tensors that the user has computed from all replicas."""
        self.whole: dict[int, tf.Tensor] = {}
        """By id, one device's values of tensors that are RANDOM."""
        self._calls: list[tuple[Any, list[Any]]] = []
        self.composites = [
            leaf
            for leaf in shard
            if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        ]
        """The leaves that several tensors hold."""
        for leaf in shard:
            self._mark_leaf(leaf)
        for count in counts:
            self.mark(count, COUNT)

    def _mark_leaf(self, leaf: Any) -> None:
        if isinstance(leaf, tf.RaggedTensor):
            self.mark(leaf.flat_values, rows(0, regular=False))
            for splits in leaf.nested_row_splits:
                self.mark(splits, ROW_SPLITS)
        elif isinstance(leaf, tf.SparseTensor):
            for part in (leaf.indices, leaf.values, leaf.dense_shape):
                self.mark(part, OPAQUE)
        elif tf.is_tensor(leaf):
            self.mark(leaf, rows(0) if leaf.shape.rank != 0 else OPAQUE)

    def mark(self, tensor: tf.Tensor, kind: Kind) -> None:
        """Sets the kind of a tensor, where the graph would not tell."""
        self._marked[id(tensor)] = tensor, kind

    def mark_equal(self, leaves: list[Any]) -> None:
        """Marks leaves, as of an all-reduce, as equal on all replicas."""
        for leaf in leaves:
            for part in parts_of(leaf):
                self.mark(part, EQUAL)

    def mark_own(self, leaves: list[Any]) -> None:
        """Marks leaves that may differ, of which one device has the first."""
        for leaf in leaves:
            for part in parts_of(leaf):
                self.mark(part, RANDOM)

    def of(self, value: Any) -> Kind:
        """Returns the kind of a traced tensor.

        Eagerly nobody can tell. A value that is no tensor is equal everywhere.
        """
        if isinstance(value, keras.Variable | tf.Variable):
            value = tf.convert_to_tensor(value)
        if not tf.is_tensor(value):
            return EQUAL
        parts = [self._of_part(part) for part in parts_of(value)]
        return parts[0] if len(set(parts)) == 1 else OPAQUE

    def depends_on_samples(self, value: Any) -> bool:
        """Whether a value was computed from the contents of the samples.

        A value of a graph inside of the step's counts as not.
        """
        if not isinstance(value, tf.Tensor) or value.graph is not self.graph:
            return False
        return walks.depends_on([value.op], [x.op for x in self.samples])

    def _of_part(self, tensor: Any) -> Kind:
        if bodies.is_eager(tensor):
            return EQUAL
        known = self.marked(tensor)
        if known is not None or self.is_blind:
            return known or OPAQUE
        return self._read(tensor.graph).of(tensor)

    def marked(self, tensor: tf.Tensor) -> Kind | None:
        """Returns the kind that was set for a tensor."""
        found = self._marked.get(id(tensor))
        return None if found is None else found[1]

    def written(self, handle: Any) -> tuple[list[tf.Tensor], bool]:
        """Returns the values that a step writes to a replica's variable.

        They come in order, with whether all are of the graph being traced.
        """
        here = tf.compat.v1.get_default_graph()
        self._read(here)
        values = self._all_written(handle)
        return values, all(value.graph is here for value in values)

    def _all_written(self, handle: Any) -> list[tf.Tensor]:
        graphs = [graph.read_on() for graph in list(self._graphs.values())]
        return [x for each in graphs for x in each.writes.get(id(handle), ())]

    def notice(self, graph: Any) -> None:
        """Reads a graph inside of the step's, before it is closed."""
        if id(graph) not in self._graphs:
            self._graphs[id(graph)] = _GraphReader(graph, self)

    def held(self, graph: Any) -> dict[int, Kind]:
        """Returns the present kinds of variables that a step has written.

        They come by the ids of handles, and differ from unwritten variables'.
        """
        if self.is_blind or graph is None:
            return {}
        return self._read(graph).held()

    def kinds_written(self, handle: Any) -> set[Kind]:
        """Returns the kinds of all that a step has written to a variable."""
        values = self._all_written(handle)
        return {self._graphs[id(value.graph)].of(value) for value in values}

    def chooses_alike(self, operation: tf.Operation) -> bool:
        """Whether replicas choose one branch, or as many turns of a loop."""
        inputs = [self.of(tensor) for tensor in operation.inputs]
        follow = rules.kinds_of_outputs
        return control_flow.chooses_alike(operation, inputs, follow)

    def _read(self, graph: Any) -> "_GraphReader":
        self.notice(graph)
        return self._graphs[id(graph)].read_on()

    def read_again(self) -> None:
        """Reads all graphs anew, as something was marked in their midst."""
        for graph in self._graphs.values():
            graph.begin()

    def mark_merged(self, leaves: list[tf.Tensor]) -> None:
        """Marks leaves that the user has computed from all replicas."""
        for leaf in leaves:
            self.mark(leaf, OPAQUE)
        self.merged.extend(leaves)

    @contextlib.contextmanager
    def calling(self, arguments: list[Any]) -> Iterator[None]:
        """Notes the arguments of a function while it is called."""
        self._calls.append((tf.compat.v1.get_default_graph(), arguments))
        try:
            yield
        finally:
            self._calls.pop()

    def outside(self, tensor: tf.Tensor) -> Any:
        """Returns what a graph captures, or is given, as a tensor, or `None`.

        An argument belongs to the call for which a function is traced.
        """
        graph = tensor.graph
        captured = bodies.captures(graph)
        if id(tensor) in captured or tensor.op.type != "Placeholder":
            return captured.get(id(tensor))
        around = getattr(graph, "outer_graph", None)
        calls = [given for caller, given in self._calls if caller is around]
        if not calls:
            return None
        arguments = [
            operation.outputs[0].name
            for operation in graph.get_operations()
            if operation.type == "Placeholder"
            and id(operation.outputs[0]) not in captured
        ]
        given = dict(zip(arguments, calls[-1], strict=False))
        return given.get(tensor.name)


class _GraphReader:
    """The kinds of the tensors of one graph, read as far as it is traced."""

    def __init__(self, graph: Any, kinds: KindInference) -> None:
        self._graph = graph
        self._all = kinds
        is_inner = graph is not kinds.graph
        outer = getattr(graph, "outer_graph", None) if is_inner else None
        self._around = kinds.held(outer)
        self._is_reading = False
        self.begin()

    def begin(self) -> None:
        """Forgets all that has been read."""
        self._position = 0
        self._kinds: dict[str, Kind] = {}
        self.writes: dict[int, list[tf.Tensor]] = {}
        self._held = dict(self._around)

    def of(self, tensor: tf.Tensor) -> Kind:
        """Returns the kind of a tensor of the part that has been read."""
        return self._all.marked(tensor) or self._kinds.get(tensor.name, OPAQUE)

    def held(self) -> dict[int, Kind]:
        """Returns the present kinds of variables that have changed."""
        here = {key: self.of(values[-1]) for key, values in self.writes.items()}
        return {
            key: MEAN if kind.role is Role.MEAN else OPAQUE
            for key, kind in (here | self._held).items()
            if kind not in (EQUAL, COUNTED)
        }

    def read_on(self) -> "_GraphReader":
        if self._is_reading:
            return self
        self._is_reading = True
        for operation in self._graph.get_operations()[self._position :]:
            self._position += 1
            names = [tensor.name for tensor in operation.outputs]
            kinds = self._of_outputs(operation)
            self._kinds |= zip(names, kinds, strict=False)
        self._is_reading = False
        return self

    def _of_outputs(self, operation: tf.Operation) -> list[Kind]:
        kind = operation.type
        if kind in ("Placeholder", "PlaceholderWithDefault"):
            return [self._of_placeholder(operation.outputs[0])]
        if kind == "ReadVariableOp":
            return [self._of_input(operation.inputs[0])]
        if kind == "AssignVariableOp":
            handle = self._outermost(operation.inputs[0])
            self.writes.setdefault(id(handle), []).append(operation.inputs[1])
            self._held.pop(id(handle), None)
        inputs = [self._of_input(tensor) for tensor in operation.inputs]
        self._note_changed(operation)
        return reductions.after_broadcast(
            operation, self.of
        ) or rules.kinds_of_outputs(operation, inputs, self._all.marked)

    def _of_input(self, tensor: tf.Tensor) -> Kind:
        """Returns a kind; for a handle, the kind of the variable's value."""
        if tensor.dtype != tf.resource or not (self.writes or self._held):
            return self.of(tensor)
        key = id(self._outermost(tensor))
        if key not in self._held and self.writes.get(key):
            return self.of(self.writes[key][-1])
        return self._held.get(key, self.of(tensor))

    def _note_changed(self, operation: tf.Operation) -> None:
        """Notes which variables a branch or a loop has changed.

        It may have written or not, so they hold one of several values. A value
        that is no mean has been exchanged there, or a warning tells of it.
        """
        for tensor in effects.ordered_by(operation):
            handle = self._outermost(tensor)
            kinds = self._all.kinds_written(handle)
            if not kinds:
                continue
            if id(handle) in self._around:
                kinds.add(self._around[id(handle)])
            roles = {kind.role for kind in kinds}
            if kinds <= {EQUAL, COUNTED}:
                self._held[id(handle)] = self.of(tensor)
            else:
                is_mean = roles <= {Role.EQUAL, Role.MEAN}
                self._held[id(handle)] = MEAN if is_mean else OPAQUE

    def _of_placeholder(self, placeholder: tf.Tensor) -> Kind:
        if placeholder.dtype == tf.resource:
            summed = self._all.is_sum(self._outermost(placeholder))
            return COUNTED if summed else EQUAL
        outside = self._all.outside(placeholder)
        return OPAQUE if outside is None else self._all.of(outside)

    def _outermost(self, handle: tf.Tensor) -> Any:
        """Returns the variable's own handle for a placeholder of it."""
        return bodies.outermost(handle, self._graph)


def parts_of(value: Any) -> list[tf.Tensor]:
    """Returns the tensors that a composite tensor consists of."""
    if isinstance(value, tf.IndexedSlices):
        return [value.values, value.indices]
    return tf.nest.flatten(value, expand_composites=True)
