"""Draws other random numbers on each replica."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._replication import step_context
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import rank_in_trace

# Seeds count up from a seed of the user's; replicas must not meet each other's.
_STRIDE = 1_000_003


def next_seed(
    original: Callable, generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns the next seed, moved by the replica's index.

    The generator's state itself is equal on all replicas, so it is saved,
    restored and resumed as on one device, and replica 0 draws what one device
    would.
    """
    with step_context.internal():
        seed = original(generator, *args, **kwargs)
    if not in_replica():
        return seed
    moved = _moved(seed)
    context = step_context.current_fit_step()
    if context is not None:
        context.kinds.mark_own([moved])
    return moved


def _moved(seed: Any) -> Any:
    rank = rank_in_trace()
    if isinstance(rank, int) and rank == 0:
        return seed
    if tf.is_tensor(rank):
        rank = tf.cast(rank, seed.dtype)
    offset = keras.ops.convert_to_tensor([rank * _STRIDE, 0], dtype=seed.dtype)
    return seed + offset
