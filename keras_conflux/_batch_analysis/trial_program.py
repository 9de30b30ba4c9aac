"""What makes a tensor of a step, as a program that runs by itself."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis import traced_graphs
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.trial_values import RandomValues
from keras_conflux._batch_analysis.trial_values import cut
from keras_conflux._batch_analysis.trial_values import nudged
from keras_conflux._batch_analysis.trial_values import parts_of_samples

_MAX_OPERATIONS = 3000
_READS = ("Placeholder", "PlaceholderWithDefault", "ReadVariableOp")
_NOT_TRIED = (*_READS, "XlaCallModule")
"""What a trial cannot run, or need not."""
_Feed = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Results:
    """What a program gives for random samples."""

    whole: Any
    """For all samples."""
    nudged: list[Any]
    """For all samples, which differ by little more than a rounding."""
    parts: list[Any]
    """For the first ones of them, and for the others."""
    sizes: tuple[int, int]
    """How many samples the parts are."""


class TrialProgram:
    """Computes a tensor from random samples.

    Args:
        output: The tensor.
        kinds: Those of the step's tensors.
        given: Tensors for which any rows may stand, as the inputs of a layer.
        is_deep: Whether what follows from the batch is computed from it, as a
            mask is. If not, any rows may stand for all that is rows.

    Raises:
        NotDerivable: If it cannot be run by itself.
    """

    def __init__(
        self,
        output: tf.Tensor,
        kinds: KindInference,
        given: Iterable[tf.Tensor],
        is_deep: bool = True,
    ) -> None:
        self.name = output.name
        self._given = {id(tensor) for tensor in given}
        self._is_deep = is_deep
        self._composites = {
            id(part): leaf
            for leaf in kinds.composites
            for part in parts_of_samples(leaf)
        }
        self._sources: dict[str, tuple[tf.Tensor, Kind]] = {}
        self._operations: dict[str, tf.Operation] = {}
        self._names: dict[str, str] = {}
        self._handed_on: dict[str, tf.Tensor] = {}
        self._variables: dict[str, tuple[list[int], tf.DType]] = {}
        self._follow(output, kinds)
        self._graph = tf.Graph()
        with self._graph.as_default():
            definition = self._definition(output.graph)
            self._output = _imported(definition, self._name(output))
            self._assignments = {
                name: self._assignment(name, shape, dtype)
                for name, (shape, dtype) in self._variables.items()
            }

    def _follow(self, output: tf.Tensor, kinds: KindInference) -> None:
        waiting = [output]
        while waiting:
            tensor = waiting.pop()
            if tensor.name in self._sources:
                continue
            kind = self._kind(tensor, kinds)
            may_be_source = tensor is not output or tensor.op.type in _READS
            if may_be_source and self._is_source(tensor, kind, kinds):
                self._sources[tensor.name] = tensor, kind
                continue
            operation = tensor.op
            if operation.type == "IdentityN":  # needs one of its inputs alone
                given = operation.inputs[tensor.value_index]
                self._handed_on[tensor.name] = given
                waiting.append(given)
                continue
            if operation.name in self._operations:
                continue
            is_known = traced_graphs.only_reads(operation)
            if operation.type in _NOT_TRIED or not is_known:
                raise NotDerivable(operation.name)
            self._operations[operation.name] = operation
            if len(self._operations) > _MAX_OPERATIONS:
                raise NotDerivable(operation.name)
            waiting.extend(operation.inputs)

    def _kind(self, tensor: tf.Tensor, kinds: KindInference) -> Kind:
        """Returns the kind of a tensor.

        What a graph inside of the step's is given is not known yet, as the
        cell of a recurrent layer, and counts as rows.
        """
        kind = kinds.of(tensor)
        if (
            id(tensor) in self._given
            and kind.role is Role.OPAQUE
            and tensor.graph is not kinds.graph
            and tensor.shape.rank
        ):
            return Kind(Role.ROWS)
        return kind

    def _is_source(
        self, tensor: tf.Tensor, kind: Kind, kinds: KindInference
    ) -> bool:
        """Whether any values, of its kind, may stand for a tensor."""
        if kind.role is Role.RANDOM or id(tensor) in self._composites:
            return True
        is_first = (
            id(tensor) in self._given
            or kinds.marked(tensor) is not None
            or tensor.op.type in _READS
            or tensor.op.op_def.is_stateful  # as what is drawn
        )
        if kind.role is Role.ROWS and (is_first or not self._is_deep):
            return not kind.is_out_of_order and kind.entries is Entries.ONE
        return kind.role is Role.EQUAL and is_first

    def _definition(self, graph: Any) -> tf.compat.v1.GraphDef:
        """Returns the program, whose sources are placeholders."""
        definition = tf.compat.v1.GraphDef()
        for number, (tensor, _) in enumerate(self._sources.values()):
            node = definition.node.add()
            node.name = self._names[tensor.name] = f"source_{number}"
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
            node.input.extend(map(self._name, operation.inputs))
        if any(map(traced_graphs.graphs_of, self._operations.values())):
            library = graph.as_graph_def().library
            definition.library.CopyFrom(library)
        return definition

    def _name(self, tensor: tf.Tensor) -> str:
        """Returns the name that a tensor has in the program."""
        while tensor.name in self._handed_on:
            tensor = self._handed_on[tensor.name]
        source = self._names.get(tensor.name)
        return tensor.name if source is None else f"{source}:0"

    def _add_variable(self, node: Any, handle: tf.Tensor) -> None:
        """Makes a node a variable like the one that a handle is of."""
        found = traced_graphs.variable_behind(handle)
        if found is None:
            raise NotDerivable(handle.name)
        shape, dtype = found
        sizes = _sizes(shape, handle.name)
        node.op = "VarHandleOp"
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(shape.as_proto())
        node.attr["shared_name"].s = node.name.encode()
        self._variables[node.name] = sizes, dtype

    def results(
        self, trials: Iterable[tuple[tuple[int, int], RandomValues]]
    ) -> list[Results]:
        """Runs it on random samples.

        Args:
            trials: For each result of how many samples the parts are, and what
                draws the samples.

        Raises:
            tf.errors.OpError: As of a place that is not there.
        """
        # TensorFlow prepares what a session runs once; to optimize it would
        # take longer than all runs.
        config = tf.compat.v1.ConfigProto(
            device_count={"GPU": 0}, allow_soft_placement=True
        )
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.compat.v1.Session(graph=self._graph, config=config) as session:
            return [self._result(session, *trial) for trial in trials]

    def _result(
        self, session: Any, sizes: tuple[int, int], values: RandomValues
    ) -> Results:
        samples = _Samples(self._sources, self._composites)
        whole = samples.drawn(values, sum(sizes))
        given = [
            whole,
            *(
                {name: nudged(x, i) for name, x in whole.items()}
                for i in (1, 2)
            ),
            samples.taken(whole, 0, sizes[0]),
            samples.taken(whole, *sizes),
        ]
        assigned = {
            value: values.shared(*self._variables[name])
            for name, (value, _) in self._assignments.items()
        }
        session.run([each for _, each in self._assignments.values()], assigned)
        found = [session.run(self._output, self._fed(each)) for each in given]
        return Results(found[0], found[1:3], found[3:], sizes)

    def _assignment(
        self, name: str, shape: list[int], dtype: tf.DType
    ) -> tuple[tf.Tensor, tf.Operation]:
        """Returns what is fed to make a variable, and what makes it."""
        value = tf.compat.v1.placeholder(dtype, shape)
        handle = self._graph.get_tensor_by_name(f"{name}:0")
        return value, tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def _fed(self, values: _Feed) -> _Feed:
        return {
            f"{self._names[name]}:0": value
            for name, value in values.items()
            if name in self._names
        }


class _Samples:
    """Values for the sources of a program, by the names of the sources."""

    def __init__(
        self,
        sources: dict[str, tuple[tf.Tensor, Kind]],
        composites: dict[int, Any],
    ) -> None:
        self._sources = sources
        self._leaves = {
            id(composites[id(tensor)]): composites[id(tensor)]
            for tensor, _ in sources.values()
            if id(tensor) in composites
        }
        self._parts = {*composites} if self._leaves else set()

    def drawn(self, values: RandomValues, count: int) -> _Feed:
        found = {}
        for leaf in self._leaves.values():
            parts = parts_of_samples(leaf)
            drawn = values.composite(leaf, count)
            found.update(zip([x.name for x in parts], drawn, strict=True))
        for name, (tensor, kind) in self._sources.items():
            if id(tensor) in self._parts or tensor.dtype == tf.resource:
                continue
            if kind.role is Role.ROWS:
                found[name] = values.rows(tensor, kind.axis, count)
            else:
                sizes = _sizes(tensor.shape, tensor.name)
                found[name] = values.shared(sizes, tensor.dtype)
        return found

    def taken(self, whole: _Feed, begin: int, size: int) -> _Feed:
        """Returns the values for a range of the samples."""
        found = dict(whole)
        for leaf in self._leaves.values():
            names = [x.name for x in parts_of_samples(leaf)]
            parts = cut(leaf, [whole[name] for name in names], begin, size)
            found.update(zip(names, parts, strict=True))
        for name, (tensor, kind) in self._sources.items():
            if kind.role is Role.ROWS and id(tensor) not in self._parts:
                places = range(begin, begin + size)
                found[name] = np.take(whole[name], places, kind.axis)
        return found


def _sizes(shape: tf.TensorShape, name: str) -> list[int]:
    if not shape.is_fully_defined():
        raise NotDerivable(name)
    return [size for size in shape.as_list() if size is not None]


def _imported(definition: tf.compat.v1.GraphDef, name: str) -> tf.Tensor:
    try:
        (found,) = tf.graph_util.import_graph_def(
            definition, return_elements=[name], name=""
        )
    except ValueError as error:  # as a function that is not known
        raise NotDerivable(name) from error
    return found
