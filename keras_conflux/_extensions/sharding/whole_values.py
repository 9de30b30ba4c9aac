"""Whole values of variables, the gradients by them, and whole models.

In a step of `fit` layers read theirs in another way: see `gathered_weights`.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.promotion import demote
from keras_conflux._replication.promotion import promote
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import replica_collectives


def gathered(variable: Any) -> tf.Tensor:
    """Returns, in a replica, the whole value of a variable.

    In a step of the user's own, each replica has a gradient of its own, by the
    whole weight, which the user reduces. A tape does not mind its shape.
    """
    step = steps.current_fit_step()

    @tf.custom_gradient
    def whole(part: tf.Tensor) -> Any:
        (flat,) = replica_collectives().gathered([part])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if step is None:
                _refuse_inner_graphs(part, variable)
                return upstream
            flat = variable.layout.flat(tf.convert_to_tensor(upstream))
            return replica_collectives().scattered([flat])[0]

        return variable.layout.whole(flat), gradient

    value = whole(variable.part.read_value())
    if step is not None:
        step.kinds.mark_equal([value])
    return value


def _refuse_inner_graphs(part: tf.Tensor, variable: Any) -> None:
    """Raises where gradients have to have the shape of a part."""
    here = tf.compat.v1.get_default_graph()
    if tf.is_symbolic_tensor(part) and part.graph is not here:
        raise NotImplementedError(
            f"A gradient by {state.name_of(variable)}, of which each device "
            "has a part, is computed in `fit`, or in the step of a loop of "
            "your own that has read the variable: not in a branch, a loop or "
            "a function inside of it. Train by `fit`, with a `train_step` of "
            'your own if you like, or replicate with `shard="optimizer"`.'
        )


def gradient(
    original: Callable,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Differentiates by all parts of a variable, outside of replicas."""
    flat = tf.nest.flatten(sources)
    if in_replica() or not any(map(state.is_in_parts, flat)):
        return original(tape, target, sources, *args, **options)
    read = [[*state.copies(x)] if state.is_in_parts(x) else x for x in flat]
    found = original(tape, target, read, *args, **options)
    return tf.nest.pack_sequence_as(sources, [*map(_joined, flat, found)])


def _joined(source: Any, found: Any) -> Any:
    """Returns the gradient by a source, of which there may be one by part."""
    if not state.is_in_parts(source):
        return found
    if any(part is None for part in found):
        return None
    return state.backing(source).layout.whole(tf.concat(found, 0))


def export(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Exports a model on one device, as the program reads whole variables."""
    if not any(map(state.is_in_parts, model.variables)):
        return original(model, *args, **kwargs)
    strategy = keras_models.strategy_of(model)
    demote(model)
    try:
        return original(model, *args, **kwargs)
    finally:
        promote(model, strategy)
