"""Finds out whether gradients that a program defines mix samples."""

import itertools
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows
from keras_conflux._batch_analysis.trial import rows_by_trial
from keras_conflux._batch_analysis.trial import statistic_by_trial
from keras_conflux._graphs import bodies
from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks

_SHARED = (Role.TOTAL, Role.MEAN, Role.DERIVED)
_KNOWN = (Role.EQUAL, Role.RANDOM, Role.ROWS)


class OwnGradients:
    """The operations of a step that have gradients of the program's own."""

    def __init__(self, kinds: KindInference) -> None:
        self._kinds = kinds
        self.outputs: dict[int, tf.Tensor] = {}  # or what layers are given
        self._known: set[int] = set()

    def between(
        self, outputs: list[tf.Tensor], given: Iterable[tf.Tensor]
    ) -> list[tf.Operation]:
        """Returns operations of a layer that have not been returned before.

        They lead from the given tensors to the outputs.
        """
        self.outputs |= {id(output): output for output in outputs}
        return self.trust(outputs, given)

    def _new_in(self, operation: tf.Operation) -> Iterator[tf.Operation]:
        """Yields itself, or operations of its graphs, if not known."""
        if not rewriting.has_own_gradient(operation):
            return
        inside = bodies.graphs_of(operation)
        if not inside and id(operation) not in self._known:
            yield operation
        for body in inside:
            if body is not None:
                _note_arguments(operation, body, self._kinds)
                for inner in body.get_operations():
                    yield from self._new_in(inner)

    def trust(self, outputs: list[tf.Tensor], given: Any) -> list[tf.Operation]:
        """Marks gradients as known, such as the package's own. Returns them."""
        ends = {id(tensor) for tensor in given}
        leading = [_operations(x, ends, self._kinds) for x in outputs]
        found = itertools.chain(*map(self._new_in, itertools.chain(*leading)))
        new = {id(each): each for each in found}
        self._known |= new.keys()
        return [*new.values()]

    def depending_on_mixed(self, loss: tf.Tensor) -> set[int]:
        """Returns the ids of tensors whose gradients depend on the whole batch.

        They lead from the outputs of layers to a loss, or are it.
        """
        found: set[int] = set()
        leading = list(_operations(loss, self.outputs, self._kinds))
        if not any(map(rewriting.has_own_gradient, leading)):
            return found
        for operation in walks.in_order(loss.graph, leading):
            if any(id(each) in found for each in operation.inputs) or any(
                self._may_mix(each) for each in self._new_in(operation)
            ):
                found.update(map(id, operation.outputs))
        return found

    def _may_mix(self, operation: tf.Operation) -> bool:
        """Whether a gradient mixes samples, or cannot be followed."""
        try:
            return self.mixes(operation, self.outputs.values())
        except NotDerivable:
            return True

    def mixes(self, operation: tf.Operation, given: Iterable[Any]) -> bool:
        """Whether a gradient that a program defines depends on all samples.

        The derivatives by rows have to belong to each row, and derivatives by a
        tensor that all replicas share have to be sums.

        Its inputs are computed of the `given` tensors, as of a layer's inputs.
        It raises `NotDerivable` if neither rules nor a trial tell.
        """
        gradient = _Kinds(self._kinds, [*given])
        tensors = [*operation.outputs, *operation.inputs]
        known = {id(each): gradient.kind(each) for each in tensors}
        graph: Any = tf.__internal__.FuncGraph("slopes", capture_by_value=False)
        with graph.as_default():
            for each in tensors:
                self._kinds.mark(graph.capture(each), known[id(each)])
            upstream = [
                gradient.upstream(each, known[id(each)])
                for each in operation.outputs
            ]
            found = rewriting.own_gradient(operation, upstream) or []
            is_mixed = any(
                gradient.is_mixed(slope, known[id(source)])
                for source, slope in zip(operation.inputs, found, strict=False)
                if slope is not None and not slope.dtype.is_integer
            )
        if is_mixed and gradient.is_of_guesses:
            raise NotDerivable(operation.name)
        return is_mixed


def _operations(
    output: tf.Tensor, ends: Collection[int], kinds: KindInference
) -> Iterator[tf.Operation]:
    """Yields the operations between known or marked tensors and an output."""

    def needed(tensors: Iterable[tf.Tensor]) -> Iterator[tf.Operation]:
        for each in tensors:
            marked = kinds.marked(each)
            is_known = marked is not None and marked.role in _KNOWN
            is_end = id(each) in ends or (is_known and each is not output)
            if not is_end and not bodies.is_eager(each):
                yield each.op

    return walks.walked(needed([output]), lambda x: needed(x.inputs))


def _note_arguments(
    operation: tf.Operation, body: Any, kinds: KindInference
) -> None:
    """Marks the arguments of a function, a branch or a loop, once traced.

    Rows that go around in a loop stay rows. Other kinds may change.
    """
    is_loop = operation.type in bodies.LOOPS
    for inside, outside in bodies.arguments(operation, body):
        kind = kinds.of(outside)
        if inside.dtype == tf.resource or kinds.marked(inside) is not None:
            continue
        if kind.role is Role.ROWS or (kind == EQUAL and not is_loop):
            kinds.mark(inside, kind)


class _Kinds:
    """The kinds of what a gradient is given, and of the derivatives."""

    def __init__(self, kinds: KindInference, given: list[tf.Tensor]) -> None:
        self._kinds = kinds
        self._given = given
        self.is_of_guesses = False
        """Whether rows may be something else, as what a turn of a loop has."""

    def kind(self, tensor: tf.Tensor) -> Kind:
        """Returns ROWS or EQUAL, if a tensor is one of these.

        What is not known in a loop or a function is taken for rows. If no
        entry touches another one, no sample does. What the whole batch shares
        is taken for EQUAL, as samples add up. Else it raises `NotDerivable`.
        """
        kind = self._kinds.of(tensor)
        if kind == EQUAL or (
            kind.role in _SHARED and tensor.shape.is_fully_defined()
        ):
            return EQUAL
        if kind.role is Role.ROWS and not kind.is_out_of_order:
            return kind
        if kind.role in (Role.OPAQUE, Role.DERIVED) and tensor.shape.rank:
            if tensor.graph is not self._kinds.graph:
                self._given.append(tensor)
                self.is_of_guesses = True
                return rows(0)
            found = rows_by_trial(tensor, self._kinds, self._given)
            if found is not None:
                return found
        raise NotDerivable(tensor.name)

    def upstream(self, output: tf.Tensor, kind: Kind) -> tf.Tensor:
        """Returns derivatives by an output, of which each sample has its own.

        It raises `NotDerivable` if samples have varying numbers of entries.
        """
        if not kind.regular:
            raise NotDerivable(output.name)
        made = tf.compat.v1.placeholder(output.dtype, output.shape)
        self._kinds.mark(made, TOTAL if kind == EQUAL else kind)
        return made

    def is_mixed(self, slope: tf.Tensor, kind: Kind) -> bool:
        """Whether derivatives by a tensor of a kind are mixed. See `mixes`."""
        shown = self._kinds.of(slope)
        if kind == EQUAL and shown.role is Role.OPAQUE:
            shown = statistic_by_trial(slope, self._kinds, self._given) or shown
        if kind == EQUAL and shown.role is not Role.OPAQUE:
            return shown != TOTAL
        if shown.role is Role.ROWS:
            return shown.is_out_of_order or shown.axis != kind.axis
        if kind == EQUAL or kind.axis != 0:
            raise NotDerivable(slope.name)
        return rows_by_trial(slope, self._kinds, self._given, False) is None
