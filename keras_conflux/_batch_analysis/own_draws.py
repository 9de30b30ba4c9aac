"""Finds numbers that each replica draws for itself and that samples share."""

import tensorflow as tf

from keras_conflux._batch_analysis import drawn
from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._graphs import bodies
from keras_conflux._graphs.effects import Effect
from keras_conflux._graphs.effects import effect_of

_OF_NO_SAMPLES = (Role.EQUAL, Role.RANDOM)


def draws_shared_by_samples(kinds: KindInference) -> list[tf.Operation]:
    """Returns a step's operations that draw numbers for several samples."""
    operations = kinds.graph.get_operations()
    if not any(map(_draws, operations)):
        return []
    reader = _Reader(kinds)
    for operation in operations:
        inputs = [kinds.of(tensor) for tensor in operation.inputs]
        reader.read(operation, inputs)
    return [*reader.found.values()]


def _draws(operation: tf.Operation) -> bool:
    """Whether it, or a graph that it runs, draws other numbers per replica.

    A `tf.random.Generator` has a variable, of which another check warns.
    """
    is_generator = operation.type.startswith("Rng")
    return Effect.DRAWS in effect_of(operation) and not is_generator


class _Reader:
    """Follows numbers of the replicas' own to the tensors that they meet."""

    def __init__(self, kinds: KindInference) -> None:
        self.found: dict[str, tf.Operation] = {}
        """By name, the operations that draw numbers that samples share."""
        self._kinds = kinds
        self._draws: dict[int, tf.Operation] = {}
        """By the ids of tensors of such numbers, the operations."""

    def read(self, operation: tf.Operation, inputs: list[Kind]) -> list[Kind]:
        """Reads an operation, and its graphs; returns the outputs' kinds."""
        is_call = operation.type in bodies.WITH_BODIES
        found = bodies.graphs_of(operation) if is_call else []
        inside = [body for body in found if body is not None]
        for body in inside:
            for argument, given in bodies.arguments(operation, body):
                self._hand_on(given, argument)
        outputs = rules.kinds_of_outputs(
            operation, inputs, self._kinds.marked, self.read
        )
        outputs = [
            self._kinds.marked(tensor) or kind
            for tensor, kind in zip(operation.outputs, outputs, strict=True)
        ]
        for body in inside:
            if len(body.outputs) >= len(operation.outputs):
                for pair in zip(body.outputs, operation.outputs, strict=False):
                    self._hand_on(*pair)
        given = operation.inputs[:1] if found else operation.inputs
        draws = [self._draws[id(x)] for x in given if id(x) in self._draws]
        if not is_call and _draws(operation):
            draws = [operation]
        if draws:
            self._follow(operation, inputs, outputs, draws[0])
        return outputs

    def _hand_on(self, tensor: tf.Tensor, other: tf.Tensor) -> None:
        if id(tensor) in self._draws:
            self._draws[id(other)] = self._draws[id(tensor)]

    def _follow(
        self,
        operation: tf.Operation,
        inputs: list[Kind],
        outputs: list[Kind],
        draw: tf.Operation,
    ) -> None:
        """Follows drawn numbers through an operation that takes some."""
        others = [
            (tensor, kind)
            for tensor, kind in zip(operation.inputs, inputs, strict=True)
            if id(tensor) not in self._draws
        ]
        results = [*zip(operation.outputs, outputs, strict=True)]
        if operation.type in drawn.RULES:
            followed = [x for x, kind in results if kind == RANDOM]
        elif _meets_samples([kind for _, kind in others], results):
            self.found[draw.name] = draw
            return
        elif all(_may_be_size(*other) for other in others):
            followed = [x for x, kind in results if kind.role is not Role.EQUAL]
        else:
            return
        for tensor in followed:
            self._draws[id(tensor)] = draw


def _meets_samples(
    others: list[Kind], results: list[tuple[tf.Tensor, Kind]]
) -> bool:
    """Whether numbers meet rows of samples, or become some themselves.

    A tensor that is DERIVED from them and from all samples is computed once
    more, with the numbers of the first replica.
    """
    if any(kind.role is Role.ROWS for _, kind in results):
        return True
    return any(kind.role is Role.ROWS for kind in others) and not all(
        kind.role in _OF_NO_SAMPLES
        or (kind.role is Role.DERIVED and tensor.shape.is_fully_defined())
        for tensor, kind in results
    )


def _may_be_size(tensor: tf.Tensor, kind: Kind) -> bool:
    """Whether a tensor may be of sizes alone, without values of samples."""
    if kind.role is Role.DERIVED:
        return tensor.dtype.is_integer
    return kind.role in (*_OF_NO_SAMPLES, Role.COUNT, Role.SHAPE)
