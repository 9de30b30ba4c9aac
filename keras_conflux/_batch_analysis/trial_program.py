"""The operations that make a tensor, run by themselves on random samples."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis import control_flow
from keras_conflux._batch_analysis import drawn
from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.analysis import parts_of
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.derivation import of_a_sample
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._graphs import bodies
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks

_MAX_OPERATIONS = 3000
_READS = ("Placeholder", "PlaceholderWithDefault", "ReadVariableOp")
_NOT_TRIED = (*_READS, "XlaCallModule")
"""The operations that a trial cannot run, or need not."""
_RARE = {
    **dict.fromkeys(("Equal", "NotEqual"), (0.0,)),
    **dict.fromkeys(("Greater", "GreaterEqual", "Less", "LessEqual"), (-1.0,)),
    **dict.fromkeys(("IsFinite", "IsInf", "IsNan"), (np.nan, np.inf, -np.inf)),
    "Relu": (),
}
"""The operations by whose results others may leave values out, with the values
that they may ask for and that are rarely drawn."""
_ROUGH = (tf.bfloat16, tf.float16)
_DRAWN = 1_000_003
"""The most numbers to draw for a tensor. They repeat in larger ones."""
_MAX_TIME = 10_000
"""In milliseconds: a loop to a fixed point may never end on random values."""
_OPEN_SIZE = 3
"""The size of axes whose size is not known."""
_Feed = dict[int, Any]
"""Values by the ids of the tensors that they are of."""


class Results(NamedTuple):
    """The results of a program for random samples."""

    whole: Any
    """The result for all samples."""
    parts: Sequence[Any]
    """The results for the first ones of them, and for the others."""
    nudged: Sequence[Any]
    """Results for all samples, nudged by little more than a rounding."""
    sizes: tuple[int, int]
    """The numbers of samples of the parts."""
    told: Sequence[Sequence[Any]]
    """By place where samples choose or are compared, what the whole and the
    parts find: conditions, numbers of a loop's turns, and `_truths`."""


@dataclasses.dataclass(eq=False)
class RandomValues:
    """Draws values for tensors of any shape.

    Floating numbers have a scale. With `None` they are between 0 and 1, as
    probabilities are. Small integers come more often than large ones. Some
    samples have the `rare` number in them, and single numbers that all share
    are `steps`, if those are not `None`.
    """

    scale: float | None
    integers: tuple[int, int]
    seed: dataclasses.InitVar[int]
    rare: float | None = None
    steps: float | None = None

    def __post_init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def rows(self, tensor: tf.Tensor, axis: int, samples: int) -> Any:
        """Returns entries for a number of samples along an axis."""
        shape = _closed(tensor.shape.as_list())
        shape[axis] = samples
        found = self._numbers(shape, tensor.dtype, self.scale)
        types = "fi" if self.rare in (-1, 0) else "f"
        if self.rare is not None and found.dtype.kind in types:
            some = np.moveaxis(found, axis, 0)[::2]  # a view
            some[self._random.integers(0, 4, some.shape) == 0] = self.rare
        return found

    def shared(self, shape: Sequence[int], dtype: tf.DType) -> Any:
        """Returns a value that all samples share, and that is not large."""
        scale = None if self.scale is None else 1
        found = self._numbers(shape, dtype, scale)
        if self.steps is not None and not shape and not dtype.is_bool:
            found = np.minimum(self.steps, dtype.max).astype(found.dtype)
        return found

    def _numbers(
        self, shape: Sequence[int], dtype: tf.DType, scale: float | None
    ) -> Any:
        count = min(math.prod(shape), _DRAWN)
        if dtype.is_floating and scale is None:
            found = self._random.uniform(0.01, 0.99, count)
        elif dtype.is_floating:
            found = (scale or 1) * self._random.normal(size=count)
        elif dtype.is_bool:
            found = self._random.integers(0, 2, count)
        elif dtype.is_integer:
            low, high = np.log1p(self.integers)
            found = np.expm1(self._random.uniform(low, high, count))
        else:
            raise NotDerivable(str(dtype))
        return np.resize(found.astype(dtype.as_numpy_dtype), shape)

    def composite(self, leaf: Any, samples: int) -> list[Any]:
        """Returns the `parts_of` of a leaf, for some samples."""
        if isinstance(leaf, tf.RaggedTensor):
            return self._ragged(leaf, samples)
        return self._sparse(leaf, samples)

    def _ragged(self, leaf: tf.RaggedTensor, samples: int) -> list[Any]:
        splits, count = [], samples
        for each in leaf.nested_row_splits:
            lengths = self._random.integers(0, 4, count)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            splits.append(ends.astype(each.dtype.as_numpy_dtype))
            count = int(ends[-1])
        return [self.rows(leaf.flat_values, 0, count), *splits]

    def _sparse(self, leaf: tf.SparseTensor, samples: int) -> list[Any]:
        shape = [samples, *_closed(leaf.shape.as_list()[1:])]
        places = np.argwhere(self._random.integers(0, 2, shape))
        dtype = leaf.values.dtype
        values = self._numbers([len(places)], dtype, self.scale)
        return [places.astype(np.int64), values, np.asarray(shape, np.int64)]


Trial = tuple[tuple[int, int], RandomValues]
"""The numbers of samples of the parts, and their values."""


class TrialProgram:
    """Computes a tensor from random samples.

    Any rows may stand for the `given` tensors, as for the inputs of a layer.
    With `is_deep`, values that follow from the batch are computed from it, as a
    mask is. If not, any rows may stand for all that is rows. It raises
    `NotDerivable` if the tensor cannot be computed by itself.
    """

    def __init__(
        self,
        output: tf.Tensor,
        kinds: KindInference,
        given: Iterable[tf.Tensor] = (),
        is_deep: bool = True,
    ) -> None:
        self.name = output.name
        self._given = {id(tensor) for tensor in given}
        self._is_deep = is_deep
        self._composites = {
            id(x): leaf for leaf in kinds.composites for x in parts_of(leaf)
        }
        self._sources: dict[int, tuple[tf.Tensor, Kind]] = {}
        self._operations: dict[tf.Operation, None] = {}
        self._names: dict[int, str] = {}
        self._handed_on: dict[int, tf.Tensor] = {}
        self._assignments: list[tuple[tf.Tensor, list[int], Any]] = []
        self._told: list[tuple[tf.Tensor, bool]] = []
        self._follow(output, kinds)
        computed = [x for each in self._operations for x in each.outputs]
        self.entries = sum(
            of_a_sample(x) for x in computed if x.shape.rank is not None
        )
        """About how many a sample has in all that is computed."""
        self.is_precise = all(x.dtype not in _ROUGH for x in computed)
        asked = (_RARE.get(x.type, ()) for x in self._operations)
        self.rare = [*dict.fromkeys(itertools.chain(*asked))]
        """The values of `_RARE` that its operations may ask for."""
        self.has_loops = any(
            bodies.is_or_runs(x, lambda each: each.type in bodies.LOOPS)
            for x in self._operations
        )
        """Whether a number may tell how many turns to take."""
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._make(output)

    def _make(self, output: tf.Tensor) -> None:
        """Makes the program, whose sources are placeholders."""
        copies: dict[int, tf.Tensor] = {}
        for key, (tensor, _) in self._sources.items():
            if tensor.dtype == tf.resource:
                copies[key] = self._variable(tensor)
            else:
                copies[key] = tf.compat.v1.placeholder(tensor.dtype)
                self._names[key] = copies[key].name
        given = {x: [*map(self._behind, x.inputs)] for x in self._operations}
        try:
            rewriting.copy_to_other(given, copies, keeps_names=False)
        except ValueError as error:  # as a function that is not known
            raise NotDerivable(self.name) from error
        sources = [tensor for tensor, _ in self._sources.values()]
        self._needed = [copies[id(self._behind(output))]]
        self.are_choices: list[bool] = []
        """Whether samples choose by what is told, or are compared."""
        for tensor, is_choice in self._told:  # by more than a shape
            if walks.flows_past([tensor], sources, lambda _: False, {}):
                copy = copies[id(self._behind(tensor))]
                self._needed.append(copy if is_choice else _truths(copy))
                self.are_choices.append(is_choice)

    def _behind(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor to copy for one that is handed on."""
        while id(tensor) in self._handed_on:
            tensor = self._handed_on[id(tensor)]
        return tensor

    def _variable(self, handle: tf.Tensor) -> tf.Tensor:
        """Returns the handle of a variable like the one that one is of."""
        found = resources.variable_behind(handle)
        if found is None:
            raise NotDerivable(handle.name)
        shape, dtype = found
        sizes = _sizes(shape, handle.name)
        name = f"variable_{len(self._assignments)}"
        new = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
        value = tf.compat.v1.placeholder(dtype, sizes)
        assigned = tf.raw_ops.AssignVariableOp(resource=new, value=value)
        self._assignments.append((value, sizes, assigned))
        return new

    def _follow(self, output: tf.Tensor, kinds: KindInference) -> None:
        def made_of(tensor: tf.Tensor) -> Iterable[tf.Tensor]:
            kind = self._kind(tensor, kinds)
            may_be_source = tensor is not output or tensor.op.type in _READS
            if may_be_source and self._is_source(tensor, kind, kinds):
                self._sources[id(tensor)] = tensor, kind
                return ()
            if (given := _handed_on(tensor)) is not None:
                self._handed_on[id(tensor)] = given
                return [given]
            operation = tensor.op
            if operation in self._operations:
                return ()
            is_known = effects.only_reads(operation)
            if operation.type in drawn.RULES:  # by a sample's place, if open
                is_known &= operation.outputs[0].shape.is_fully_defined()
            if operation.type in _NOT_TRIED or not is_known:
                raise NotDerivable(operation.name)
            self._operations[operation] = None
            self._told += [(x, True) for x in _choice(operation, kinds)]
            if operation.type in _RARE:
                self._told.append((operation.outputs[0], False))
            if len(self._operations) > _MAX_OPERATIONS:
                raise NotDerivable(operation.name)
            return operation.inputs

        for _ in walks.walked([output], made_of):
            pass

    def _kind(self, tensor: tf.Tensor, kinds: KindInference) -> Kind:
        """Returns the kind of a tensor.

        The arguments of a graph inside of the step's are not known yet, as in
        the cell of a recurrent layer, and count as rows.
        """
        kind = kinds.of(tensor)
        is_argument = id(tensor) in self._given and tensor.shape.rank
        is_known = kind.role not in (Role.OPAQUE, Role.DERIVED)
        if is_known or not is_argument or tensor.graph is kinds.graph:
            return kind
        return Kind(Role.ROWS)

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
            or tensor.op.op_def.is_stateful  # as draws are
        )
        if tensor.dtype == tf.variant:  # a list that gradients keep
            return False
        if kind.role is Role.ROWS and (is_first or not self._is_deep):
            return not kind.is_out_of_order and kind.entries is Entries.ONE
        return kind.role is Role.EQUAL and is_first

    def results(
        self, trials: Iterable[Trial], optional: Iterable[Trial]
    ) -> list[Results]:
        """Runs it on random samples, once for each of the trials.

        It may raise a `tf.errors.OpError`, as of a place that is not there, but
        not for the `optional` trials.
        """
        # TensorFlow prepares it once: to optimize it would take too long.
        config = tf.compat.v1.ConfigProto(
            device_count={"GPU": 0}, allow_soft_placement=True
        )
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.operation_timeout_in_ms = _MAX_TIME
        with tf.compat.v1.Session(graph=self._graph, config=config) as session:
            found = [self._result(session, *trial) for trial in trials]
            for trial in optional:
                with contextlib.suppress(tf.errors.OpError):
                    found.append(self._result(session, *trial))
        return found

    def _result(
        self, session: Any, sizes: tuple[int, int], values: RandomValues
    ) -> Results:
        whole = self._drawn(values, sum(sizes))
        held = {
            value: values.shared(sizes, value.dtype)
            for value, sizes, _ in self._assignments
        }
        parts = self._taken(whole, 0, sizes[0]), self._taken(whole, *sizes)
        found = self._run(session, [whole, *parts], held)
        for seed in (1, 2):
            given = {key: nudged(x, seed) for key, x in whole.items()}
            weights = {key: nudged(x, seed) for key, x in held.items()}
            found += self._run(session, [given], weights)
        results, *others = zip(*found, strict=True)
        told = [each[:3] for each in others]
        return Results(results[0], results[1:3], results[3:], sizes, told)

    def _run(self, session: Any, given: list[_Feed], held: Any) -> list[Any]:
        """Returns what is needed for values, and for values of variables."""
        session.run([each for *_, each in self._assignments], held)
        feeds = (
            {self._names[key]: each[key] for key in self._names.keys() & each}
            for each in given
        )
        return [session.run(self._needed, feed) for feed in feeds]

    def _drawn(self, values: RandomValues, count: int) -> _Feed:
        """Returns random values for the sources."""
        found = {}
        for leaf in self._leaves():
            parts = map(id, parts_of(leaf))
            drawn = values.composite(leaf, count)
            found.update(zip(parts, drawn, strict=True))
        for key, (tensor, kind) in self._sources.items():
            if key in self._composites or tensor.dtype == tf.resource:
                continue
            if kind.role is Role.ROWS:
                found[key] = values.rows(tensor, kind.axis, count)
            else:
                sizes = _sizes(tensor.shape, tensor.name)
                found[key] = values.shared(sizes, tensor.dtype)
        return found

    def _taken(self, whole: _Feed, begin: int, size: int) -> _Feed:
        """Returns the values for a range of the samples."""
        found = dict(whole)
        for leaf in self._leaves():
            keys = [id(x) for x in parts_of(leaf)]
            parts = cut(leaf, [whole[key] for key in keys], begin, size)
            found.update(zip(keys, parts, strict=True))
        for key, (_, kind) in self._sources.items():
            if kind.role is Role.ROWS and key not in self._composites:
                places = range(begin, begin + size)
                found[key] = np.take(whole[key], places, kind.axis)
        return found

    def _leaves(self) -> list[Any]:
        """Returns the composite leaves that it needs."""
        needed = self._composites.items()
        return [*{id(x): x for k, x in needed if k in self._sources}.values()]


def _choice(operation: tf.Operation, kinds: KindInference) -> list[tf.Tensor]:
    """Returns what tells how samples choose a branch, or a loop's turns.

    It raises `NotDerivable` for a choice inside of it, of which nothing tells.
    """

    def read(inner: tf.Operation, inputs: list[Kind]) -> list[Kind]:
        if _chooses(inner, inputs):
            raise NotDerivable(inner.name)
        return rules.kinds_of_outputs(inner, inputs, inside=read)

    if operation.type not in bodies.WITH_BODIES:
        return []
    inputs = [kinds.of(tensor) for tensor in operation.inputs]
    is_loop = operation.type in bodies.LOOPS
    if not is_loop or not _takes_samples_one_by_one(operation, inputs):
        rules.kinds_of_outputs(operation, inputs, inside=read)
    if not _chooses(operation, inputs):
        return []
    # A loop's first output counts its turns.
    return [operation.outputs[0] if is_loop else operation.inputs[0]]


def _chooses(operation: tf.Operation, inputs: list[Kind]) -> bool:
    """Whether samples choose a branch, or the number of a loop's turns."""
    follow = rules.kinds_of_outputs
    alike = control_flow.chooses_alike(operation, inputs, follow)
    return not alike and inputs[0].role is not Role.RANDOM


def _takes_samples_one_by_one(loop: tf.Operation, inputs: list[Kind]) -> bool:
    """Whether all that a loop gets of samples is in lists, as in `tf.map_fn`.

    Lists of rows have a time step of all samples in each element.
    """
    turns = control_flow.of_turns(loop, inputs, rules.kinds_of_outputs)
    return turns is not None and all(
        kind.role in (Role.EQUAL, Role.COUNT)
        or (kind.role is Role.DERIVED and tensor.dtype == tf.variant)
        for tensor, kind in zip(loop.inputs, turns, strict=True)
    )


def _truths(compared: tf.Tensor) -> tf.Tensor:
    """Returns whether any comparison is true, and whether any is false."""
    true = tf.cast(compared, tf.bool)
    return tf.stack([tf.reduce_any(true), tf.logical_not(tf.reduce_all(true))])


def _handed_on(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor of which one is a mere copy, if it is."""
    if tensor.op.type == "IdentityN":  # needs one of its inputs alone
        return tensor.op.inputs[tensor.value_index]
    if tensor.op.type != "Placeholder":
        return None
    outside = bodies.captures(tensor.graph).get(id(tensor))
    return None if bodies.is_eager(outside) else outside


def _sizes(shape: tf.TensorShape, name: str) -> list[int]:
    if not shape.is_fully_defined():
        raise NotDerivable(name)
    return [size for size in shape.as_list() if size is not None]


def nudged(values: Any, seed: int) -> Any:
    """Returns floating numbers that differ by little more than a rounding."""
    if values.dtype.kind != "f":
        return values
    random = np.random.default_rng(seed)
    factors = 1 + 1e-6 * random.normal(size=min(values.size, _DRAWN))
    return values * np.resize(factors.astype(values.dtype), values.shape)


def cut(leaf: Any, parts: list[Any], begin: int, size: int) -> list[Any]:
    """Returns the parts of a ragged or sparse leaf for a range of samples."""
    if isinstance(leaf, tf.RaggedTensor):
        flat, *splits = parts
        end, taken = begin + size, []
        for each in splits:
            taken.append(each[begin : end + 1] - each[begin])
            begin, end = int(each[begin]), int(each[end])
        return [flat[begin:end], *taken]
    places, values, shape = parts
    chosen = (places[:, 0] >= begin) & (places[:, 0] < begin + size)
    first = np.zeros_like(places[:1])
    first[:, :1] = begin
    return [places[chosen] - first, values[chosen], [size, *shape[1:]]]


def _closed(shape: list[int | None]) -> list[int]:
    return [_OPEN_SIZE if size is None else size for size in shape]
