"""The side effects of operations, in one table."""

import enum
import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from keras_conflux._graphs import bodies
from keras_conflux._graphs import resources


class Effect(enum.Flag):
    """The effect on state of an operation and of the graphs that it runs."""

    NOTHING = 0
    READS = enum.auto()
    """Returns the value of a resource at the time when it runs."""
    CHECKS = enum.auto()
    """Raises, or does nothing."""
    WRITES = enum.auto()
    """Changes a resource, or a file."""
    DRAWS = enum.auto()
    """Gives other numbers each time."""
    WAITS = enum.auto()
    """Waits for other replicas."""
    OTHER = enum.auto()
    """Stateful, and nobody knows how."""


HARMLESS = Effect.READS | Effect.CHECKS
"""Changes nothing, however often it runs."""
COLLECTIVES = ("CollectiveReduceV2", "NcclAllReduce", "XlaAllReduce")
"""The types of operations in which replicas wait for each other."""
_TABLE = {
    Effect.READS: "HashTableV2 LookupTableFindV2 LookupTableSizeV2 "
    "MutableHashTableV2 ReadVariableOp ResourceGather ResourceGatherNd "
    "VarHandleOp VarIsInitializedOp VariableShape",
    Effect.CHECKS: "Assert CheckNumerics CheckNumericsV2",
    Effect.DRAWS: "Multinomial ParameterizedTruncatedNormal RandomGamma "
    "RandomPoisson RandomPoissonV2 RandomShuffle RandomStandardNormal "
    "RandomUniform RandomUniformInt StatefulRandomBinomial TruncatedNormal",
    Effect.DRAWS | Effect.WRITES: "RngReadAndSkip RngSkip",
    Effect.WAITS: " ".join(COLLECTIVES),
}
_BY_TYPE = {kind: x for x, kinds in _TABLE.items() for kind in kinds.split()}
_WRITES = (
    *("Assign", "ResourceScatter", "ResourceStridedSliceAssign"),
    *("ResourceApply", "ResourceSparseApply", "Write"),
)
"""The beginnings of the types of other operations that write."""
_known: dict[str, Effect] = {}
"""The effects of operations that have been met, by type."""
_modules: dict[bytes, Effect] = {}
"""The effects of this package's StableHLO modules."""


def note_module(serialized: bytes, waits: bool) -> None:
    """Says of a StableHLO module that it does no more than, perhaps, wait."""
    _modules[serialized] = Effect.WAITS if waits else Effect.NOTHING


def of_type(kind: str) -> Effect:
    """Returns the effects of operations of a type, as far as the type tells."""
    writes = Effect.WRITES if kind.startswith(_WRITES) else Effect.NOTHING
    return _BY_TYPE.get(kind, writes)


def effect_of(operation: tf.Operation) -> Effect:
    """Returns the effects of an operation, and of all that it runs."""
    inside = bodies.graphs_of(operation)
    if None in inside:
        return Effect.OTHER
    if inside:
        runs = itertools.chain(*(each.get_operations() for each in inside))
        return functools.reduce(operator.or_, map(effect_of, runs), Effect(0))
    kind = operation.type
    if kind == "XlaCallModule":
        return _modules.get(operation.get_attr("module"), Effect.OTHER)
    is_of_zeros = kind == "Empty" and operation.get_attr("init")
    is_cudnn = kind.startswith("CudnnRNN")
    if is_of_zeros or (is_cudnn and not operation.get_attr("dropout")):
        return Effect.NOTHING
    if kind not in _known:
        is_stateful = operation.op_def.is_stateful
        unknown = Effect.OTHER if is_stateful else Effect.NOTHING
        _known[kind] = of_type(kind) or unknown
    return _known[kind]


def waits(operation: tf.Operation) -> bool:
    """Whether replicas wait for each other in it, or in what it runs."""
    return Effect.WAITS in effect_of(operation)


def is_collective(operation: tf.Operation) -> bool:
    """Whether it is itself one in which replicas wait for each other."""
    return not bodies.graphs_of(operation) and waits(operation)


def is_repeatable(operation: tf.Operation) -> bool:
    """Whether an operation gives the same once more, whatever runs between."""
    return not effect_of(operation) & ~Effect.CHECKS


def only_reads(operation: tf.Operation) -> bool:
    """Whether an operation changes nothing, and may read variables inside."""
    return not effect_of(operation) & ~HARMLESS


def ordered_by(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the resources by which TensorFlow orders an operation."""
    given = [x for x in operation.inputs if x.dtype == tf.resource]
    find = auto_control_deps_utils.get_read_write_resource_inputs
    found = find(operation)[1] if given else ()
    return [x for x in given if x in found]


def writes_within(
    operation: tf.Operation, handle: tf.Tensor, callers: dict[Any, tf.Operation]
) -> Iterator[tf.Operation]:
    """Yields what writes a resource: an operation, or others that it runs.

    The operation's graph knows it by the handle. The callers get, by each graph
    inside, the operation that runs it. First values are left out.
    """
    graphs = bodies.graphs_of(operation)
    if not graphs:
        yield operation
    if graphs and operation.inputs[0].op.type == "VarIsInitializedOp":
        return
    for body in filter(None, graphs):
        callers[body] = operation
        for inside, outside in bodies.arguments(operation, body):
            for use in inside.consumers() if outside is handle else ():
                if any(tensor is inside for tensor in ordered_by(use)):
                    yield from writes_within(use, inside, callers)


def writes(graph: Any) -> Iterator[tuple[Any, list[tf.Operation]]]:
    """Yields a graph's resources, as known outside, and what may change them.

    That are operations of the graph, or such as run others inside.
    """
    changed = functools.cache(
        lambda x: {id(bodies.outermost(y, graph)) for y in ordered_by(x)}
    )
    for handle, uses in resources.uses_of_resources(graph):
        yield handle, [x for x in uses if id(handle) in changed(x)]


def changes(
    graph: Any, handle: Any, operations: list[tf.Operation]
) -> list[tf.Operation]:
    """Returns the innermost of the `writes` of a resource that change it.

    Those of `tf.summary`, which say what is, are left out.
    """
    inside = graph.capture(handle)
    within = (writes_within(x, inside, {}) for x in operations)
    found = [x for x in itertools.chain(*within) if not only_reads(x)]
    return [x for x in found if not x.type.startswith("Write")]
