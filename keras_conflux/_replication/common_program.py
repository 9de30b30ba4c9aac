"""Whether all replicas have traced the same program, and the first difference.

A trace is listed as lines, one per operation, without what may differ between
replicas: names, devices, shapes, TensorFlow's seeds, values computed from a
rank inside of `of_rank`, and the order. Of a program that asks for its rank
elsewhere, as by `replica()`, collectives alone are compared.
"""

import collections
import functools
import itertools
import zlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from keras_conflux._cluster.agreement import Comparable
from keras_conflux._cluster.agreement import gather_if_different
from keras_conflux._cluster.failures import of_all_processes
from keras_conflux._cluster.processes import process_count
from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.errors import StrategyError
from keras_conflux._common.user_warnings import is_of_package
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.tensorflow_tracing import is_of_rank
from keras_conflux._graphs import bodies
from keras_conflux._graphs import resources
from keras_conflux._graphs.effects import COLLECTIVES

_LARGEST = 64
"""How many entries the constants have that are shown in full."""
_UNSAID = {"Const", "Identity", "NoOp", "Placeholder"}
_UNSAID |= {"Assert", "Print", "PrintV2", "StringFormat"}
"""Operations that compute nothing, or that one process may run and others not,
as all summaries. Constants are said where they are used."""
_NAMES = {"config", "config_proto", "container", "executor_type"}
_NAMES |= {"message", "shared_name", "token", "seed", "seed2", "value"}


class _Line(NamedTuple):
    operation: tf.Operation
    alone: str
    """The operation, without the ones that it computes from and runs."""
    text: str


class CommonProgram:
    """A replica's trace between the begin of this object and its `close`."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs
        self.graph: Any = tf.compat.v1.get_default_graph()
        self.begin = self.end = len(self.graph.get_operations())
        self._asked = tensorflow_tracing.ranks_asked_in(self.graph)
        self._knows_rank = False

    @property
    def operations(self) -> list[tf.Operation]:
        """The traced operations."""
        return self.graph.get_operations()[self.begin : self.end]

    def close(self) -> None:
        """Leaves out operations that are traced from now on."""
        self.end = len(self.graph.get_operations())
        asked = tensorflow_tracing.ranks_asked_in(self.graph)
        self._knows_rank = asked > self._asked

    def agree(self, what: str, beside: Any = None) -> bool:
        """Raises in all processes unless all have traced the same.

        Processes whose inputs are of other shapes may have traced something
        else, and are not compared. They compare `beside` in the same message.
        Returns whether all have the very same program, and the same beside.
        """
        if process_count() == 1:
            return True
        own = Comparable([self._own.digest, beside])
        if gather_if_different(what, own) is None:
            return True
        told = gather_if_different(f"the program of {what}", self._own) or []
        for pair in itertools.combinations(enumerate(told), 2):
            (inputs, lines), (other_inputs, others) = (each for _, each in pair)
            if inputs == other_inputs and sorted(lines) != sorted(others):
                raise of_all_processes(_difference(what, dict(pair)))
        return False

    def variables(self) -> list[Any]:
        """Returns the variables with copies that the graph uses."""
        uses = resources.uses_of_resources(self.graph)
        found = [resources.container_of(handle) for handle, _ in uses]
        return [*{id(x): x for x in found if x is not None}.values()]

    @functools.cached_property
    def _own(self) -> Comparable:
        texts = [line.text for line in self.lines]
        return Comparable([self.specs, texts], [self.specs, sorted(texts)])

    @property
    def specs(self) -> list[str]:
        """The dtypes and shapes of the inputs."""
        tensors = [x for x in trees.flatten(self.inputs) if tf.is_tensor(x)]
        return [f"{x.dtype.name} {x.shape}" for x in tensors]

    @functools.cached_property
    def lines(self) -> list[_Line]:
        """The trace, line by line, behind the functions that it runs."""
        listing = _Listing(self.graph, self._knows_rank)
        own = list(listing.lines(self.operations))
        lines = [*itertools.chain(*listing.bodies.values()), *own]
        if not self._knows_rank:
            return lines
        return [line for line in lines if line.operation.type in COLLECTIVES]


def assert_alike(programs: Sequence[CommonProgram], name: str) -> None:
    """Raises unless the replicas of this process have traced the same.

    Replicas whose parts of the data are of other shapes are not compared, and
    neither are replicas that took turns, as where they merge.
    """
    for index, other in enumerate(programs[1:], 1):
        first = programs[0]
        if other.specs != first.specs or other.begin < first.end:
            continue
        if _sorted(first.lines) == _sorted(other.lines):
            continue
        # The package may know something for one replica, as where draws begin.
        told = [
            [x.alone for x in each.lines if not is_of_package(x.operation)]
            for each in (first, other)
        ]
        one, another = _only_in_one(*told)
        if one != another:
            raise StrategyError(
                f"{name}: Python code of the step did something else when it "
                f"was traced for replica {index}: {another} in place of {one}. "
                "One device runs that code once. Do not let a counter, a flag "
                "or a random number of Python's change the step: keep what "
                "changes in a `keras.Variable`, draw with `keras.random`, or "
                "pass it with the data."
            )


def _sorted(lines: list[_Line]) -> list[str]:
    return sorted(line.text for line in lines)


def _only_in_one(own: list[str], others: list[str]) -> list[str]:
    """Returns the first line that the other program lacks, of each of two."""
    counts = collections.Counter(own), collections.Counter(others)
    left = counts[0] - counts[1], counts[1] - counts[0]
    return [next(iter(each), "nothing") for each in left]


def _difference(what: str, told: dict[int, Any]) -> ReplicaMismatchError:
    """Returns an error that tells what two processes have traced."""
    found = _only_in_one(*(lines for _, lines in told.values()))
    kinds = [text.partition("(")[0] for text in found]
    shown = found if kinds[0] == kinds[1] else kinds
    listed = ", ".join(
        f"{text} in process {i}" for i, text in zip(told, shown, strict=True)
    )
    return ReplicaMismatchError(
        f"The processes have traced different programs for {what}. One "
        f"operation is {listed}. All "
        "processes have to run the same program: the same layers, loss, "
        "regularizers and optimizer, with the same settings, and the same "
        "layers that are not `trainable`. What depends on the process must "
        "not be in a step."
    )


class _Listing:
    """Lists operations of a graph, and of the functions that they run."""

    def __init__(self, graph: Any, knows_rank: bool) -> None:
        self._variables = _variables_in(graph)
        self._knows_rank = knows_rank
        self.bodies: dict[Any, list[_Line]] = {}

    def lines(self, operations: Sequence[tf.Operation]) -> Iterator[_Line]:
        """Yields a line for each operation that computes something."""
        for operation in operations:
            if (
                operation.type in _UNSAID
                or "Summary" in operation.type
                or is_of_rank(operation.name)
            ):
                continue
            kind, graphs = _what_runs(operation)
            runs = [self._body(graph) for graph in graphs]
            if graphs and not any(runs):
                continue
            inputs = [] if self._knows_rank else operation.inputs
            sources = [self._source_of(tensor) for tensor in inputs]
            given = [source for source, is_given in sources if is_given]
            attributes = _attributes_of(operation.node_def)
            alone, text = (
                f"{kind}({', '.join(each)}) {attributes}"
                for each in (given, [source for source, _ in sources])
            )
            digests = [zlib.crc32(str(each).encode()) for each in runs]
            yield _Line(operation, alone, " ".join([text, *map(str, digests)]))

    def _body(self, graph: Any) -> list[str]:
        """Lists a function, and returns its lines in order."""
        if graph not in self.bodies:
            self.bodies[graph] = list(self.lines(graph.get_operations()))
        return _sorted(self.bodies[graph])

    def _source_of(self, tensor: tf.Tensor) -> tuple[str, bool]:
        """Returns a constant or variable, or the type of an operation."""
        made = tensor.op
        while made.type == "Identity" and not is_of_rank(made.name):
            made = made.inputs[0].op
        if is_of_rank(made.name):
            return "rank", True
        if made.type == "Placeholder":
            return self._variables.get(id(made.outputs[0]), "input"), True
        if made.type == "Const":
            return _constant(made.get_attr("value")), True
        return _what_runs(made)[0], False


def _what_runs(operation: tf.Operation) -> tuple[str, list[Any]]:
    """Returns an operation's type, and the graphs that it runs."""
    # Some calls have the name of their function, new in each trace.
    named = bodies.function_named(operation.graph, operation.type)
    if named is not None:
        return "function", [named]
    found = bodies.graphs_of(operation)
    return operation.type, [each for each in found if each is not None]


def _attributes_of(node: Any) -> str:
    """Returns attributes as text, without names, shapes and functions."""
    attributes = [
        f"{key}={' '.join(str(value).split())}"
        for key, value in sorted(node.attr.items())
        if not (key.startswith("_") or key in _NAMES)
        and value.WhichOneof("value") not in ("shape", "func", "tensor")
        and not (value.list.shape or value.list.func)
    ]
    return f"{{{', '.join(attributes)}}}"


def _variables_in(graph: Any) -> dict[int, str]:
    """Returns, by ids of placeholders, the variables and tables behind them.

    Numbers stand for variables, which may have other names elsewhere.
    """
    numbers: dict[int, int] = {}
    found = {}
    for _, inside in graph.captures:
        handle = bodies.outermost(inside, graph)
        variable = resources.container_of(handle)
        if variable is not None:
            number = numbers.setdefault(id(variable), len(numbers))
            found[id(inside)] = f"variable {number}"
        elif inside.dtype == tf.resource and process_count() > 1:
            for read in inside.consumers():
                if read.type == "LookupTableFindV2":
                    found[id(inside)] = _table(handle, read)
    return found


def _table(handle: Any, read: tf.Operation) -> str:
    """Returns a digest of what a table holds, in whatever order."""
    with tf.init_scope():
        pairs = tf.raw_ops.LookupTableExportV2(
            table_handle=handle,
            Tkeys=read.get_attr("Tin"),
            Tvalues=read.get_attr("Tout"),
        )
    held = sorted(zip(*(x.numpy().tolist() for x in pairs), strict=True))
    return f"a table {zlib.crc32(str(held).encode())}"


def _constant(proto: Any) -> str:
    value = tf.make_ndarray(proto)
    if value.size > _LARGEST:
        return f"{value.dtype} {zlib.crc32(proto.SerializeToString())}"
    return str(value.tolist())
