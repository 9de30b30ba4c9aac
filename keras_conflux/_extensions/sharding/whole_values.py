"""Whole values of variables, and the gradients by them, and whole models.

Layers in a step of `fit` read their weights in another way. See
`gathered_weights`.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._extensions.sharding.compat import ShardedVariable
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.promotion import demote
from keras_conflux._replication.promotion import promote
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Part
from keras_conflux._replication.steps import Step


class WholeValues(Part):
    """The values that a step of the user's own has read.

    There each replica has a gradient of its own, by the whole weight, which the
    user reduces. So a tape is asked for that by the values.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._read: dict[int, list[tf.Tensor]] = {}
        self._parts: set[int] = set()
        self.are_asked = False
        """Whether a tape needs no gradients by parts, which it passes."""

    def note_value(self, variable: ShardedVariable, value: tf.Tensor) -> None:
        """Notes one of them."""
        self._read.setdefault(id(variable), []).append(value)
        self._parts.add(id(variable.part))

    def has_part(self, sources: list[Any]) -> bool:
        """Whether a part itself is among the sources of a tape."""
        return any(id(source) in self._parts for source in sources)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Marks a call of a tape for gradients by none of the parts."""
        before, self.are_asked = self.are_asked, True
        try:
            yield
        finally:
            self.are_asked = before

    def read(self, variable: Any) -> list[tf.Tensor]:
        """Returns the values of a variable, which a tape here knows.

        Raises:
            NotImplementedError: If some were read in another graph.
        """
        found = self._read.get(id(state.backing(variable)), [])
        graph = tf.compat.v1.get_default_graph()
        if any(value.graph is not graph for value in found):
            raise _not_here(variable)
        return found


def gathered(variable: ShardedVariable) -> tf.Tensor:
    """Returns, in a replica, the whole value of a variable."""
    step = steps.current_fit_step()

    @tf.custom_gradient
    def whole(part: tf.Tensor) -> Any:
        (flat,) = replica_collectives().gathered([part])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if step is None:
                return _passed(part, variable)
            flat = variable.layout.flat(tf.convert_to_tensor(upstream))
            return replica_collectives().scattered([flat])[0]

        return variable.layout.whole(flat), gradient

    value = whole(variable.part.read_value())
    if step is not None:
        step.kinds.mark_equal([value])
    elif not tf.executing_eagerly():
        own = steps.current()
        if own is not None:
            WholeValues.of(own).note_value(variable, value)
    return value


def _passed(part: tf.Tensor, variable: ShardedVariable) -> tf.Tensor:
    """Returns a gradient that nobody needs, where a tape passes by a part."""
    step = steps.current()
    if step is None or not WholeValues.of(step).are_asked:
        raise _not_here(variable)
    return tf.zeros_like(part)


def gradient(
    original: Callable,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Differentiates by whole values, in a step of the user's own.

    Outside of replicas, where all parts of a variable are read, by all of them.
    """
    step = steps.current()
    flat = tf.nest.flatten(sources)
    options = output_gradients, unconnected_gradients
    if not in_replica() and any(map(state.is_in_parts, flat)):
        read = [[*state.copies(x)] if state.is_in_parts(x) else x for x in flat]
        found = gradient(original, tape, target, read, *options)
        joined = map(_joined, flat, found)
        return tf.nest.pack_sequence_as(sources, [*joined])
    if (
        step is None
        or steps.current_fit_step() is not None
        or tf.executing_eagerly()
        or WholeValues.of(step).has_part(flat)  # as in `tf.recompute_grad`
    ):
        return original(tape, target, sources, *options)
    values = WholeValues.of(step)
    with values.asked():
        if not any(map(state.is_in_parts, flat)):
            return original(tape, target, sources, *options)
        read = [values.read(x) if state.is_in_parts(x) else x for x in flat]
        found = original(tape, target, read, output_gradients)
    is_zero = unconnected_gradients != tf.UnconnectedGradients.NONE
    sums = [
        _summed(each, source, is_zero)
        for each, source in zip(found, flat, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, sums)


def _joined(source: Any, found: Any) -> Any:
    """Returns the gradient by a source, of which there may be one by part."""
    if not state.is_in_parts(source):
        return found
    if any(part is None for part in found):
        return None
    return state.backing(source).layout.whole(tf.concat(found, 0))


def _summed(found: Any, source: Any, is_zero: bool) -> Any:
    """Adds up the gradients by all values of a variable that were read."""
    each = found if isinstance(found, list) else [found]
    known = [g for g in each if g is not None]
    if not known:
        return tf.zeros(source.shape, source.dtype) if is_zero else None
    if len(known) == 1:
        return known[0]
    return tf.add_n([tf.convert_to_tensor(g) for g in known])


def _not_here(variable: Any) -> NotImplementedError:
    return NotImplementedError(
        f"A gradient by {state.name_of(variable)}, of which each device has a "
        "part, is computed in `fit`, or in the graph of a loop of your own "
        "in which the variable was read: not in a branch, a loop or a "
        "function inside of it, and not eagerly. Train by `fit`, with a "
        "`train_step` of your own if you like, or replicate with "
        '`shard="optimizer"`.'
    )


def export(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Exports a model that lies whole on one device meanwhile."""
    with _whole(model):
        return original(model, *args, **kwargs)


@contextlib.contextmanager
def _whole(model: keras.Model) -> Iterator[None]:
    """Puts a model whose weights lie in parts on one device meanwhile.

    An exported program reads whole variables.
    """
    is_cut = any(map(state.is_in_parts, model.variables))
    strategy = keras_models.strategy_of(model)
    if not is_cut:
        yield
        return
    demote(model)
    try:
        yield
    finally:
        promote(model, strategy)
