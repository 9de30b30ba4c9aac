"""Refuses collectives that some replicas reach and others may not.

A branch or a loop may hold a collective if its condition is provably equal:
computed from constants, equal arguments, results of collectives, and variables
of integers whose copies are equal. Copies of a weight may have come apart.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common.errors import StrategyError
from keras_conflux._common.user_warnings import users_line
from keras_conflux._graphs import bodies
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._replication.state import is_mirrored


def refuse_unequal(
    name: str, operations: Sequence[tf.Operation], equal: set[int]
) -> None:
    """Raises for a collective whose branch not all replicas may take."""
    if any(map(_runs_collectives, operations)):
        graph: Any = operations[0].graph
        found = {
            id(inside): _is_equal_outside(bodies.outermost(inside, graph))
            for inside in getattr(graph, "internal_captures", ())
        }
        _Walk(name).over(operations, found | dict.fromkeys(equal, True))


def _is_equal_outside(tensor: Any) -> bool:
    """Whether a capture of a trace is equal on all replicas."""
    variable = resources.container_of(tensor)
    return variable is None or is_mirrored(variable)


def _runs_collectives(operation: tf.Operation) -> bool:
    """Whether a branch, a loop or a call runs a collective."""
    return operation.type in bodies.WITH_BODIES and effects.waits(operation)


class _Walk:
    """Follows tensors that are equal on all replicas through graphs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def over(
        self, operations: Sequence[tf.Operation], equal: dict[int, bool]
    ) -> dict[int, bool]:
        """Returns, by id, whether the tensors of a graph are equal."""
        for operation in operations:
            inputs = [equal.get(id(x), False) for x in operation.inputs]
            if operation.type == "Placeholder":
                continue
            outputs = self._outputs(operation, inputs)
            equal |= zip(map(id, operation.outputs), outputs, strict=False)
        return equal

    def _outputs(self, operation: Any, inputs: list[bool]) -> list[bool]:
        kind, count = operation.type, len(operation.outputs)
        runs_others = kind in bodies.WITH_BODIES
        inside = bodies.graphs_of(operation) if runs_others else []
        effect = effects.effect_of(operation)
        if effect is effects.Effect.WAITS and not inside:
            return [True] * count
        if kind == "IdentityN":
            return inputs
        if not inside and effect is effects.Effect.READS:
            dtype = operation.outputs[0].dtype
            return [all(inputs) and (dtype.is_integer or dtype.is_bool)]
        if not inside:
            return [not effect and all(inputs)] * count
        if kind in bodies.CALLS:
            return self._of_body(inside[0], inputs)
        if kind in bodies.BRANCHES | bodies.CASES:
            condition, *inputs = inputs
            found = [self._of_body(body, inputs) for body in inside]
            outputs = [condition and all(x) for x in zip(*found, strict=True)]
        else:
            condition, outputs = self._of_loop(operation, inputs)
        if not condition and _runs_collectives(operation):
            raise self._refusal(operation)
        return outputs

    def _of_body(self, body: Any, inputs: list[bool]) -> list[bool]:
        """Returns whether the outputs of a function are equal."""
        given = dict(zip(map(id, body.inputs), inputs, strict=False))
        equal = self.over(body.get_operations(), given)
        return [equal.get(id(x), False) for x in body.outputs]

    def _of_loop(
        self, operation: tf.Operation, inputs: list[bool]
    ) -> tuple[bool, list[bool]]:
        """Returns whether all replicas make as many turns, and its outputs."""
        names = [operation.get_attr(key).name for key in ("cond", "body")]
        end, turn = (bodies.function_named(operation.graph, x) for x in names)
        while True:
            condition = self._of_body(end, inputs)[0]
            following = self._of_body(turn, inputs)
            both = [a and b for a, b in zip(inputs, following, strict=True)]
            if both == inputs:
                return condition, [condition and each for each in inputs]
            inputs = both

    def _refusal(self, operation: tf.Operation) -> StrategyError:
        file, line = users_line(operation)
        kind = "loop" if operation.type in bodies.LOOPS else "branch"
        return StrategyError(
            f"{self._name}: a collective is in a {kind} (line {line} of "
            f"{file}) whose condition may differ between the replicas. Those "
            "that do not come to it would leave the others waiting for ever. "
            "Make the condition equal on all, as by "
            '`kc.allreduce("max", condition)`, or call the collective outside '
            f"of the {kind}."
        )
