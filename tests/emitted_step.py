"""What a step must be in parts, emitted from plain Keras' own trace of it.

Plain Keras traces its step once, for the whole batch, and nothing of it is
replaced. Each operation of the trace is then run in one of two ways, by what
the rules of the analysis say of it: once for each part of the batch, if that
gives the rows of the part, or what only has to be added up or averaged; or
else once, on the values of the whole batch. So what no rule knows is right as
well. Losses, gradients, optimizers, metrics, writes and draws need no code of
their own.

A program that replicas get wrong and this right is a fault with its mend in
view. `test_emitted_steps.py` runs a sample, and `emitted_programs.py` prints a
table of many.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

import keras_conflux
from keras_conflux._batch_analysis import drawn
from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows
from keras_conflux._graphs import bodies
from keras_conflux._graphs import resources
from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks
from keras_conflux._graphs.effects import HARMLESS
from keras_conflux._graphs.effects import effect_of

_IN_PARTS = (Role.ROWS, Role.SHAPE, Role.COUNT)
_REDUCED = (Role.TOTAL, Role.MEAN)
_KEEPS, _SUMS = Kind(Role.SHAPE, axis=-1), Kind(Role.SHAPE, axis=-2)
"""Of axes that gradients are summed over: whether that of the samples is left.
No kind of the analysis says of axes what these are."""


@dataclasses.dataclass
class Value:
    """What a tensor of the trace is, in the graph of the parts."""

    kind: Kind
    """EQUAL for what is the same for all parts; else ROWS, SHAPE or COUNT."""
    whole: Any = None
    """The value of one device, if somebody has asked for it."""
    parts: list | None = None
    """The value of each part, if somebody has asked for one."""


class Emission:
    """A step's operations, put into the current graph for parts of a batch.

    Args:
        sizes: The numbers of samples of the parts.
    """

    def __init__(self, sizes: list[tf.Tensor]) -> None:
        self.counts: collections.Counter = collections.Counter()
        """Operations in parts, whole and shared; sums; tensors gathered."""
        self.computed_whole: collections.Counter = collections.Counter()
        """By their types, the operations on gathered samples."""
        self._sizes = sizes
        self._samples = tf.add_n(sizes)
        self._values: dict[int, Value] = {}

    def give(self, tensor: tf.Tensor, value: Value) -> None:
        """Says what a placeholder of the trace is here."""
        self._values[id(tensor)] = value

    def cut(self, tensor: tf.Tensor) -> Value:
        """Returns the parts of a tensor of one row per sample."""
        return Value(rows(0), None, tf.split(tensor, self._sizes))

    def run(self, graph: Any) -> None:
        """Emits all that results and effects of a graph need."""
        ends = [x.op for x in graph.outputs] + [*graph.control_outputs]
        needed = set(
            walks.walked(
                ends, lambda each: [*walks.before(each), *each.control_inputs]
            )
        )
        for each in walks.to_run(graph):
            if each in needed and each.type not in ("Placeholder", "NoOp"):
                try:
                    self._emit(each)
                except Exception as error:
                    error.add_note(f"{each.type} {each.name} is emitted")
                    raise

    def whole(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what one device has for a tensor of the trace."""
        value = self._values[id(tensor)]
        if value.whole is None:
            value.whole = self._joined(tensor, value)
        return value.whole

    def _joined(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        kind, parts = value.kind, value.parts or []
        if kind.axis < 0:
            inputs = [self.whole(x) for x in tensor.op.inputs]
            return _copied(tensor.op, inputs)[tensor.value_index]
        self.counts["gathered"] += kind.role is Role.ROWS
        if tensor.dtype == tf.variant:
            lists = [_stacked(tensor, each) for each in parts]
            return _listed(tensor, _combined(_of_lists(kind), lists))
        return _combined(kind, parts)

    def _part(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        value = self._values[id(tensor)]
        if value.kind == EQUAL:
            return value.whole
        if value.parts is None:
            axis = value.kind.axis
            entries = tf.shape(value.whole)[axis] // self._samples
            lengths = [size * entries for size in self._sizes]
            value.parts = tf.split(value.whole, lengths, axis)
        return value.parts[number]

    def _emit(self, operation: tf.Operation) -> None:
        values = [self._values[id(x)] for x in operation.inputs]
        if all(each.kind == EQUAL for each in values):
            self._share(operation)
        elif effect_of(operation) & ~HARMLESS:
            self._emit_whole(operation, [])
        else:
            self._emit_by_rules(operation, values)

    def _emit_by_rules(
        self, operation: tf.Operation, values: list[Value]
    ) -> None:
        given = [each.kind for each in values]
        kinds = self._kinds_of(operation, given)
        numbers = [each for each in values if each.kind.role is Role.COUNT]
        if operation.type in drawn.RULES:
            first = given[0]
            is_of_rows = first.role is Role.SHAPE and first.regular
            self._emit_whole(operation, [rows(first.axis)] * is_of_rows)
        elif all(map(_is_clean, kinds)):
            self._emit_parts(operation, kinds, ())
        elif numbers:
            # The numbers of samples are those of the whole batch.
            self._emit_with_numbers(operation, given, kinds)
        else:
            self._emit_whole(operation, kinds)

    def _emit_with_numbers(
        self, operation: tf.Operation, given: list[Kind], kinds: list[Kind]
    ) -> None:
        again = [EQUAL if x.role is Role.COUNT else x for x in given]
        found = self._kinds_of(operation, again)
        if all(each == EQUAL for each in again):
            self._share(operation)
        elif all(map(_is_clean, found)):
            numbers = [
                id(x)
                for x, each in zip(operation.inputs, again, strict=True)
                if each == EQUAL
            ]
            self._emit_parts(operation, found, numbers)
        else:
            self._emit_whole(operation, kinds)

    def _kinds_of(
        self, operation: tf.Operation, given: list[Kind]
    ) -> list[Kind]:
        """Returns what the rules say, and of gradients of what was broadcast.

        These are summed over axes that the shapes tell, and then get the shape.
        """
        roles = [each.role for each in given]
        if operation.type == "BroadcastGradientArgs":
            return [_KEEPS if x is Role.SHAPE else _SUMS for x in roles]
        if roles == [Role.ROWS, Role.SHAPE]:
            one, other = given
            if operation.type == "Sum" and other in (_KEEPS, _SUMS):
                return [one.at(-1) if other == _KEEPS else TOTAL]
            if operation.type == "Reshape" and one.axis == -1:
                return [one.at(other.axis)]
        return rules.kinds_of_outputs(operation, given, inside=self._kinds_of)

    def _share(self, operation: tf.Operation) -> None:
        """Emits what is the same for all parts."""
        self.counts["shared"] += 1
        made = _copied(operation, [self.whole(x) for x in operation.inputs])
        for old, new in zip(operation.outputs, made, strict=True):
            self._values[id(old)] = Value(EQUAL, new)

    def _emit_parts(
        self, operation: tf.Operation, kinds: list[Kind], numbers: Any
    ) -> None:
        self.counts["in parts"] += 1
        each = [
            _copied(
                operation,
                [
                    self.whole(x) if id(x) in numbers else self._part(x, number)
                    for x in operation.inputs
                ],
            )
            for number in range(len(self._sizes))
        ]
        for old, kind, *parts in zip(
            operation.outputs, kinds, *each, strict=True
        ):
            if kind == EQUAL:
                found = Value(EQUAL, parts[0])
            elif kind.role in _REDUCED:
                self.counts["reduced"] += 1
                found = Value(EQUAL, self._reduced(kind.role, parts))
            else:
                found = Value(kind, None, parts)
            self._values[id(old)] = found

    def _reduced(self, role: Role, parts: list[tf.Tensor]) -> tf.Tensor:
        """Returns a sum, or a mean, of all samples."""
        dtype, terms = parts[0].dtype, []
        for part, size in zip(parts, self._sizes, strict=True):
            if role is Role.MEAN:
                part *= tf.cast(size, dtype) / tf.cast(self._samples, dtype)
            terms.append(tf.where(size > 0, part, tf.zeros_like(part)))
        return tf.add_n(terms)

    def _emit_whole(self, operation: tf.Operation, kinds: list[Kind]) -> None:
        """Emits an operation once, on what one device has."""
        if operation.type in bodies.CALLS:
            self._emit_inside(operation)
            return
        self.counts["whole"] += 1
        self.computed_whole[operation.type] += 1
        made = _copied(operation, [self.whole(x) for x in operation.inputs])
        kinds = kinds or [EQUAL] * len(made)
        for old, new, kind in zip(operation.outputs, made, kinds, strict=True):
            is_of_rows = kind.role is Role.ROWS and kind.regular
            kept = rows(kind.axis).with_entries(kind.entries)
            is_one = kind.blocks == 1 and new.dtype != tf.variant
            can_be_cut = is_of_rows and is_one
            self._values[id(old)] = Value(kept if can_be_cut else EQUAL, new)

    def _emit_inside(self, call: tf.Operation) -> None:
        """Emits what a function does in place of a call of it."""
        (body,) = bodies.graphs_of(call)
        for outside, inside in zip(call.inputs, body.inputs, strict=True):
            self._values[id(inside)] = self._values[id(outside)]
        self.run(body)
        for outside, inside in zip(call.outputs, body.outputs, strict=False):
            self._values[id(outside)] = self._values[id(inside)]


def _is_clean(kind: Kind) -> bool:
    """Whether parts give what the whole batch gives, or its sum or mean."""
    return (
        kind == EQUAL
        or kind.role in _REDUCED
        or (kind.role in _IN_PARTS and not kind.is_out_of_order)
    )


def _copied(
    operation: tf.Operation, inputs: list[tf.Tensor]
) -> list[tf.Tensor]:
    here: Any = tf.compat.v1.get_default_graph()
    for name in bodies.functions_of(operation):
        here._add_function_recursive(operation.graph._get_function(name))
    made = rewriting.copied(operation, inputs)
    for old, new in zip(operation.outputs, made, strict=True):
        if new.dtype in (tf.resource, tf.variant):
            resources.copy_handle_data(old, new)
        else:
            new.set_shape(old.shape)
    return made


def _combined(kind: Kind, parts: list[tf.Tensor]) -> tf.Tensor:
    """Returns what one device has of what the parts have."""
    if kind.role is Role.ROWS:
        return tf.concat(parts, kind.axis)
    if kind.role is Role.COUNT:
        return tf.add_n(parts)
    at = tf.range(tf.shape(parts[0])[-1]) == kind.axis
    return tf.where(at, tf.add_n(parts), parts[0])


def _of_lists(kind: Kind) -> Kind:
    is_of_rows = kind.role is Role.ROWS
    return kind.at(kind.axis + 1) if is_of_rows else kind


def _stacked(old: tf.Tensor, elements: tf.Tensor) -> tf.Tensor:
    """Returns the elements of a list as one tensor."""
    shape, dtype = _elements_of(old)
    return tf.raw_ops.TensorListStack(
        input_handle=elements, element_shape=shape, element_dtype=dtype
    )


def _listed(old: tf.Tensor, stacked: tf.Tensor) -> tf.Tensor:
    shape, _ = _elements_of(old)
    made = tf.raw_ops.TensorListFromTensor(tensor=stacked, element_shape=shape)
    resources.copy_handle_data(old, made)
    return made


def _elements_of(old: tf.Tensor) -> tuple[Any, tf.DType]:
    found = resources.variable_behind(old)
    if found is None:
        raise NotImplementedError(f"{old.name} is a list of unknown tensors")
    shape, dtype = found
    known = shape.rank is not None
    return [-1 if n is None else n for n in shape] if known else -1, dtype


emitted: list[Emission] = []
"""What was emitted latest."""


class EmittedStep:
    """A step of a model that is emitted for parts of each batch.

    Args:
        step: What plain Keras runs of a batch.
        parts: Into how many parts a batch is cut, as evenly as possible.
    """

    def __init__(self, step: Any, parts: int) -> None:
        self._step, self._parts = step, parts

    def __call__(self, data: Any) -> Any:
        """Runs it, or traces it anew where a function is traced."""
        leaves = [x for x in tf.nest.flatten(data) if x is not None]
        if not all(isinstance(x, tf.Tensor) for x in leaves):
            raise NotImplementedError("ragged and sparse batches")

        def step(*given: tf.Tensor) -> Any:
            waiting = iter(given)
            return self._step(
                tf.nest.map_structure(
                    lambda x: None if x is None else next(waiting), data
                )
            )

        traced = tf.function(step, autograph=False).get_concrete_function(
            *(tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in leaves)
        )
        if tf.executing_eagerly():
            return tf.function(self._emitted, autograph=False)(traced, leaves)
        return self._emitted(traced, leaves)

    def _emitted(self, traced: Any, leaves: list[tf.Tensor]) -> Any:
        samples, count = tf.shape(leaves[0])[0], self._parts
        ends = [samples * i // count for i in range(count + 1)]
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        emission = Emission(sizes)
        emitted.append(emission)
        for outside, inside in traced.graph.captures:
            emission.give(inside, Value(EQUAL, outside))
        for inside, leaf in zip(traced.graph.inputs, leaves, strict=False):
            emission.give(inside, emission.cut(leaf))
        emission.run(traced.graph)
        return tf.nest.map_structure(
            lambda x: tf.identity(emission.whole(x)),
            traced.graph.structured_outputs,
        )


def emit(model: keras.Model, parts: int) -> keras.Model:
    """Has a model of plain Keras train and evaluate by emitted steps.

    Args:
        model: Any, before it is trained.
        parts: Into how many parts each batch is cut.
    """
    model.train_step = EmittedStep(model.train_step, parts)
    model.test_step = EmittedStep(model.test_step, parts)
    return model


@contextlib.contextmanager
def in_place_of_replicas() -> Iterator[list[Emission]]:
    """Has tests that replicate a model emit its steps instead.

    Yields:
        What is emitted.
    """

    def replicate(model: keras.Model, devices: int) -> keras.Model:
        return emit(model, devices)

    emitted.clear()
    with mock.patch.object(keras_conflux, "replicate", replicate):
        yield emitted
