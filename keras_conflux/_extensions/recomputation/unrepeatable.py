"""Finds operations that cannot run twice with the result of one run."""

from collections.abc import Iterable
from collections.abc import Iterator

import tensorflow as tf

from keras_conflux._graphs import bodies
from keras_conflux._graphs import effects
from keras_conflux._graphs import walks

_HARMLESS = effects.HARMLESS | effects.Effect.WAITS


def refuse(operations: Iterable[tf.Operation], name: str) -> None:
    """Raises if operations of a second run write something or draw anew.

    Args:
        operations: All that it has made.
        name: The name of their layer in the message.
    """
    for operation in _with_effect(operations):
        raise NotImplementedError(
            f"{name} cannot be computed again for the backward pass, as the "
            f"operation {operation.type!r} in it ({operation.name}) writes "
            "something or draws other numbers each time. Keep such values "
            "in a `keras.Variable`, draw by `keras.random` with a "
            "`keras.random.SeedGenerator`, or leave the layer out of "
            "`keras.RematScope`."
        )


def _with_effect(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    for operation in operations:
        inside = bodies.graphs_of(operation)
        if inside and None not in inside:
            for body in inside:
                yield from _with_effect(bodies.operations_of(body))
        elif effects.effect_of(operation) & ~_HARMLESS and not (
            _numbers_a_collective(operation)
        ):
            yield operation


def _numbers_a_collective(operation: tf.Operation) -> bool:
    """Whether an operation counts on for the key of a collective."""
    if operation.type != "AssignAddVariableOp":
        return False

    def read_by(user: tf.Operation) -> list[tf.Operation]:
        is_passing = user.type in ("ReadVariableOp", "Identity")
        return walks.after(user) if is_passing else []

    users = walks.walked(operation.inputs[0].consumers(), read_by)
    return any(map(effects.is_collective, users))
