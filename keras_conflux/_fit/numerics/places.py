"""Tells where a replica's samples are in the global batch.

A `tf.function` that a step calls may be called by other steps later, so it may
not use what one of them computes. It reads the place from a variable, which
steps write before.
"""

import contextlib

import tensorflow as tf

from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.global_batch.kinds import COUNT
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import Place
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import replica_index


def here(context: StepContext) -> Place:
    """Returns the place for what is being traced, in a step or inside of it."""
    strategy = current_strategy()
    if context.in_xla or not tensorflow_tracing.in_function_of(context.graph):
        return context.place()
    strategy.places_are_read = True
    write(context)
    with on_host():
        place = Place(*tf.unstack(strategy.places[replica_index()]))
    for number in (place.own, place.before, place.total):
        context.kinds.mark(number, COUNT)
    return place


def write(context: StepContext) -> None:
    """Writes the place for functions that a step calls, if any reads it."""
    strategy = current_strategy()
    if not strategy.places_are_read or context.place_is_written:
        return
    if context.graph is None or context.in_xla:
        return
    context.place_is_written = True
    with context.graph.as_default(), on_host():
        place = context.place()
        strategy.places[replica_index()].assign(
            tf.stack([place.own, place.before, place.total])
        )


def on_host() -> contextlib.AbstractContextManager:
    """Keeps what computes with a few integers from a replica's GPU."""
    if step_context.current() is None or in_xla():
        return contextlib.nullcontext()
    if current_strategy().devices[0].kind != "GPU":
        return contextlib.nullcontext()
    return tf.device("CPU:0")


def in_xla() -> bool:
    """Whether XLA compiles what is being traced."""
    return step_context.in_xla() or tensorflow_tracing.in_compiled_function()
