"""Muon's iterations are dealt: each replica iterates on some matrices.

They are most of Muon's cost, and the gradients are the same on all
replicas, which would all compute the same. Of so many matrices of one shape as
there are replicas, each replica takes one, and the results are gathered.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common.contexts import Setting
from keras_conflux._compat import keras_optimizers
from keras_conflux._fit.numerics import given_tensors
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.replica_context import replica_collectives

_Iterated = Callable[[tf.Tensor], tf.Tensor]
_Matrix = tuple[tf.Tensor, Sequence[keras.Variable], list[tf.Tensor]]
"""A gradient, the matrix and its optimizer state, and their values."""

_answer: Setting[_Iterated | None] = Setting(None)


def iterate(
    original: Callable, optimizer: Any, x: tf.Tensor, steps: int
) -> tf.Tensor:
    """Returns the iterations' result for a matrix, or the one set for it."""
    answer = _answer.get()
    return original(optimizer, x, steps) if answer is None else answer(x)


def update(
    original: Callable,
    optimizer: Any,
    grads: list[Any],
    variables: list[Any],
    learning_rate: Any,
) -> None:
    """Updates matrices by iterations that are dealt, and all else as before."""
    if not _deals(optimizer, learning_rate):
        original(optimizer, grads, variables, learning_rate)
        return
    together = keras_optimizers.updated_together(optimizer)
    matrices: list[_Matrix] = []
    rest: list[tuple[Any, Any]] = []
    for g, variable in zip(grads, variables, strict=True):
        index = keras_optimizers.index_of(optimizer, state.backing(variable))
        if optimizer.adam_velocities[index] is None:
            kept = together[index]
            values = [tf.convert_to_tensor(state.backing(x)) for x in kept]
            matrices.append((tf.convert_to_tensor(g), kept, values))
        else:
            rest.append((g, variable))
    given_tensors.update_rest(original, optimizer, rest, learning_rate)
    shared = given_tensors.SharedUpdate(optimizer, learning_rate)
    inputs = [_input(shared, matrix) for matrix in matrices]
    for matrix, found in zip(matrices, _dealt(optimizer, inputs), strict=True):
        _update(shared, matrix, found)


def _deals(optimizer: Any, learning_rate: Any) -> bool:
    return (
        type(optimizer) is keras.optimizers.Muon
        and keras_optimizers.updates_with_tensors(optimizer, learning_rate)
        and "zeropower_via_newtonschulz5" not in vars(optimizer)
        and in_replica()
        and steps.current_fit_step() is not None
        and not tf.executing_eagerly()
        and replica_collectives().count > 1
        # Gatherings have no order between programs of several processes.
        and process_count() == 1
    )


def _updated(
    shared: given_tensors.SharedUpdate, matrix: _Matrix, answer: _Iterated
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns new values, with an answer in place of the iterations."""
    with _answer.to(answer):
        return shared.of(*matrix, inline=True)


def _input(shared: given_tensors.SharedUpdate, matrix: _Matrix) -> tf.Tensor:
    """Returns the input of the iterations."""
    found: list[tf.Tensor] = []

    def noted(x: tf.Tensor) -> tf.Tensor:
        found.append(x)
        return x

    _updated(shared, matrix, noted)
    (x,) = found
    return x


def _update(
    shared: given_tensors.SharedUpdate, matrix: _Matrix, iterated: tf.Tensor
) -> None:
    """Writes the matrix, and its optimizer state."""
    for variable, value in _updated(shared, matrix, lambda _: iterated):
        if state.is_in_parts(variable):
            state.backing(variable).assign(value, read_value=False)
        else:
            given_tensors.overwrite(state.own_copy(variable), value)


def _dealt(optimizer: Any, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the iterations' results for matrices, each on one replica."""
    found = list(inputs)
    for where in _rounds(inputs):
        given = [inputs[i] for i in where]
        for i, x in zip(where, _each_by_one(optimizer, given), strict=True):
            found[i] = x
    return found


def _rounds(inputs: list[tf.Tensor]) -> list[list[int]]:
    """Groups matrices of one shape, of which each replica takes at most one."""
    count = replica_collectives().count
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(inputs):
        alike.setdefault((tuple(x.shape), x.dtype), []).append(i)
    return [
        where[begin : begin + count]
        for where in alike.values()
        for begin in range(0, len(where), count)
    ]


def _each_by_one(optimizer: Any, given: list[tf.Tensor]) -> list[tf.Tensor]:
    if len(given) == 1:  # which all have
        return [_iterated(optimizer, given[0])]
    collectives = replica_collectives()
    # A replica that gets none computes one again.
    several = [given[i % len(given)] for i in range(collectives.count)]
    own = tf.gather(tf.stack(several), rank_as_tensor())
    own = _iterated(optimizer, tf.ensure_shape(own, given[0].shape))
    (flat,) = collectives.gathered([tf.reshape(own, [-1])])
    whole = tf.reshape(flat, [collectives.count, *given[0].shape])
    found = tf.unstack(whole)[: len(given)]
    step = steps.current_fit_step()
    assert step is not None, "it is a step of `fit` that deals"
    step.kinds.mark_equal(found)
    return found


def _iterated(optimizer: Any, x: tf.Tensor) -> tf.Tensor:
    return optimizer.zeropower_via_newtonschulz5(x, optimizer.ns_steps)
