"""Finds out by running it whether a graph computes each sample by itself.

Where no rule tells how a tensor is made of rows, the few operations that make
it are run twice on random rows: all at once, and in two parts. If the results
of the parts, joined, are those of all, no sample has touched another one.
"""

import functools
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._compat import tensorflow_graphs
from keras_conflux._fit.global_batch import drawn
from keras_conflux._fit.global_batch.derivation import MAX_OPERATIONS
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import Entries
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._replication.step_context import StepContext

_TRIALS = (((2, 3), 1), ((4, 1), 0.1), ((1, 4), 30))
"""Of how many samples the parts are, and how large their numbers."""
_SMALLEST_INTEGERS = (0, 1)
"""Of which integers one is drawn, or the next. They may be places, or numbers
of steps, of which there is at least one."""
_OPEN_SIZE = 3
"""The size of axes whose size is not known."""
_READS = ("Placeholder", "PlaceholderWithDefault", "ReadVariableOp")


def rows_of(
    output: tf.Tensor, context: StepContext, given: Iterable[tf.Tensor] = ()
) -> Kind | None:
    """Returns the kind of rows that a tensor is found to be.

    Args:
        output: Traced, with the samples along its first axis.
        context: Of the step.
        given: Tensors of which it is computed, such as the inputs of a layer.

    Returns:
        `None` if samples touch each other.

    Raises:
        CannotTell: If it cannot be run.
    """
    trial = _Trial(output, context, given)
    for smallest in _SMALLEST_INTEGERS:
        try:
            found = [
                trial.entries(parts, scale, smallest)
                for parts, scale in _TRIALS
            ]
        except tf.errors.OpError:  # as of a place that is not there
            continue
        known = [entries for entries in found if entries is not None]
        if len(known) < len(found):
            return None
        return Kind(Role.ROWS, entries=functools.reduce(_both, known))
    raise CannotTell(output.name)


def draws_numbers(output: tf.Tensor, given: Iterable[tf.Tensor]) -> bool:
    """Whether random numbers are drawn between some tensors and a result."""
    ends = {id(tensor) for tensor in given}
    waiting, seen = [output], set()
    while waiting and len(seen) < MAX_OPERATIONS:
        tensor = waiting.pop()
        if id(tensor) in ends or tensor.op.name in seen:
            continue
        seen.add(tensor.op.name)
        if _has_draws(tensor.op):
            return True
        waiting.extend(tensor.op.inputs)
    return False


def _has_draws(operation: tf.Operation) -> bool:
    return operation.type in drawn.RULES or any(
        _has_draws(inner)
        for body in tensorflow_graphs.graphs_of(operation)
        if body is not None
        for inner in body.get_operations()
    )


def _both(one: Entries, other: Entries) -> Entries:
    return one if one is other else Entries.VARYING


class _Trial:
    """What makes a tensor, as a program of its own.

    Args:
        output: The tensor.
        context: Of the step.
        given: See `rows_of`.
    """

    def __init__(
        self,
        output: tf.Tensor,
        context: StepContext,
        given: Iterable[tf.Tensor],
    ) -> None:
        self._given = {id(tensor) for tensor in given}
        self._sources: dict[str, tuple[tf.Tensor, Kind]] = {}
        self._operations: dict[str, tf.Operation] = {}
        self._random = np.random.default_rng(0)
        self._smallest = 0
        self._follow(output, context)
        self._variables: dict[str, Any] = {}
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._output = _imported(
                self._definition(output.graph), output.name
            )
            self._made = [
                tf.raw_ops.AssignVariableOp(
                    resource=self._graph.get_tensor_by_name(f"{name}:0"),
                    value=value,
                )
                for name, value in self._variables.items()
            ]

    def _follow(self, output: tf.Tensor, context: StepContext) -> None:
        waiting = [output]
        while waiting:
            tensor = waiting.pop()
            if tensor.name in self._sources:
                continue
            kind = self._kind(tensor, context)
            if tensor is not output and self._is_source(tensor, kind, context):
                self._sources[tensor.name] = tensor, kind
                continue
            operation = tensor.op
            if operation.name in self._operations:
                continue
            if operation.type in _READS or not tensorflow_graphs.only_reads(
                operation
            ):
                raise CannotTell(operation.name)
            self._operations[operation.name] = operation
            if len(self._operations) > MAX_OPERATIONS:
                raise CannotTell(operation.name)
            waiting.extend(operation.inputs)

    def _kind(self, tensor: tf.Tensor, context: StepContext) -> Kind:
        """Returns the kind of a tensor.

        What a graph inside of the step's is given is not known yet, as the
        cell of a recurrent layer, and counts as rows.
        """
        kind = context.kinds.of(tensor)
        if (
            id(tensor) in self._given
            and kind.role is Role.OPAQUE
            and tensor.graph is not context.graph
            and tensor.shape.rank
        ):
            return Kind(Role.ROWS)
        return kind

    def _is_source(
        self, tensor: tf.Tensor, kind: Kind, context: StepContext
    ) -> bool:
        """Whether any values, of its kind, may stand for a tensor.

        What follows from others has to be computed from them, as a mask is.
        """
        if kind.role is Role.RANDOM:
            return True
        is_first = (
            id(tensor) in self._given
            or context.kinds.marked(tensor) is not None
            or tensor.op.type in _READS
            or tensor.op.op_def.is_stateful  # as what is drawn
        )
        if kind.role is Role.ROWS and is_first:
            return not kind.is_tangled and kind.entries is Entries.ONE
        return kind.role is Role.EQUAL and is_first

    def _definition(self, graph: Any) -> tf.compat.v1.GraphDef:
        """Returns the program, whose sources are placeholders."""
        definition = tf.compat.v1.GraphDef()
        names = {}
        for number, (tensor, _) in enumerate(self._sources.values()):
            node = definition.node.add()
            node.name = names[tensor.name] = f"source_{number}"
            if tensor.dtype == tf.resource:
                self._add_variable(node, tensor)
                continue
            node.op = "Placeholder"
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        for operation in self._operations.values():
            node = definition.node.add()
            node.CopyFrom(operation.node_def)
            node.device = ""
            node.attr.pop("_class", None)
            del node.input[:]
            node.input.extend(
                names.get(x.name, x.name) for x in operation.inputs
            )
        if any(map(tensorflow_graphs.graphs_of, self._operations.values())):
            library = graph.as_graph_def().library
            definition.library.CopyFrom(library)
        self._names = names
        return definition

    def _add_variable(self, node: Any, handle: tf.Tensor) -> None:
        """Makes a node a variable like the one that a handle is of."""
        found = tensorflow_graphs.variable_behind(handle)
        if found is None:
            raise CannotTell(handle.name)
        shape, dtype = found
        node.op = "VarHandleOp"
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
        node.attr["shared_name"].s = node.name.encode()
        self._variables[node.name] = self._numbers(shape, dtype)

    def entries(
        self, parts: Sequence[int], scale: float, smallest: int
    ) -> Entries | None:
        """Returns how many entries samples have; `None` if they are mixed."""
        self._smallest = smallest
        feeds = [self._feed(sum(parts), scale)]
        begin = 0
        for size in parts:
            feeds.append(self._part_of(feeds[0], begin, size))
            begin += size
        config = tf.compat.v1.ConfigProto(
            device_count={"GPU": 0}, allow_soft_placement=True
        )
        with tf.compat.v1.Session(graph=self._graph, config=config) as session:
            session.run(self._made)
            whole, *found = (session.run(self._output, feed) for feed in feeds)
        if any(part.shape[1:] != whole.shape[1:] for part in found):
            return None
        joined = np.concatenate(found)
        if joined.shape != whole.shape or not _are_close(joined, whole):
            return None
        lengths = [len(part) for part in found]
        if lengths == list(parts):
            return Entries.ONE
        one, other = (n / size for n, size in zip(lengths, parts, strict=True))
        return Entries.SAME if one == other else Entries.VARYING

    def _feed(self, samples: int, scale: float) -> dict[str, Any]:
        return {
            f"{self._names[name]}:0": self._drawn(tensor, kind, samples, scale)
            for name, (tensor, kind) in self._sources.items()
            if tensor.dtype != tf.resource
        }

    def _part_of(self, feed: dict[str, Any], begin: int, size: int) -> Any:
        found = dict(feed)
        for name, (_, kind) in self._sources.items():
            if kind.role is Role.ROWS and not kind.is_tangled:
                key = f"{self._names[name]}:0"
                taken = range(begin, begin + size)
                found[key] = np.take(feed[key], taken, kind.axis)
        return found

    def _drawn(
        self, tensor: tf.Tensor, kind: Kind, samples: int, scale: float
    ) -> Any:
        """Draws the values of a source."""
        shape = tensor.shape.as_list()
        if kind.role is not Role.ROWS:
            scale = 1
        else:
            shape = [_OPEN_SIZE if size is None else size for size in shape]
            shape[kind.axis] = samples
        sizes = [size for size in shape if size is not None]
        if len(sizes) < len(shape):
            raise CannotTell(tensor.name)
        return self._numbers(sizes, tensor.dtype, scale)

    def _numbers(
        self, shape: list[int], dtype: tf.DType, scale: float = 1
    ) -> Any:
        if dtype.is_floating:
            drawn = scale * self._random.normal(size=shape)
        elif dtype.is_bool:
            drawn = self._random.integers(0, 2, shape)
        elif dtype.is_integer:
            drawn = self._smallest + self._random.integers(0, 2, shape)
        else:
            raise CannotTell(str(dtype))
        return drawn.astype(dtype.as_numpy_dtype)


def _imported(definition: tf.compat.v1.GraphDef, name: str) -> tf.Tensor:
    try:
        (found,) = tf.graph_util.import_graph_def(
            definition, return_elements=[name], name=""
        )
    except ValueError as error:  # as a function that is not known
        raise CannotTell(name) from error
    return found


def _are_close(one: Any, other: Any) -> bool:
    if one.dtype.kind in "biu":
        return bool((one == other).all())
    one, other = (np.asarray(x, np.float64) for x in (one, other))
    scale = np.abs(other[np.isfinite(other)]).max(initial=1e-6)
    return np.allclose(one, other, 1e-2, 1e-3 * scale, equal_nan=True)
