"""Methods of a model outside of replicas, where weights are whole."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._extensions.sharding import cutting
from keras_conflux._replication import state
from keras_conflux._replication.promotion import demote
from keras_conflux._replication.promotion import promote
from keras_conflux._replication.replica_context import in_replica


def gradient(
    original: Callable,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *options: Any,
    **named: Any,
) -> Any:
    """Differentiates by all parts of a variable, where all of them are read."""
    flat = tf.nest.flatten(sources)
    if in_replica() or not any(map(state.is_in_parts, flat)):
        return original(tape, target, sources, *options, **named)
    read = [list(state.copies(x)) if state.is_in_parts(x) else x for x in flat]
    found = original(tape, target, read, *options, **named)
    joined = [
        cutting.whole_of(source, parts) if state.is_in_parts(source) else parts
        for source, parts in zip(flat, found, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, joined)


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
