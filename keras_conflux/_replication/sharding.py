"""Which variables lie in parts, and how they come to it.

A strategy with `shard="optimizer"` keeps the state of optimizers in parts, one
with `shard="weights"` also the weights. Few entries are not worth an exchange.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.parts import Layout
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._compat.sharded_variable import ShardedVariable
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import is_replicated
from keras_conflux._replication.strategy import outside_of_strategies
from keras_conflux._replication.strategy import rank_as_tensor
from keras_conflux._replication.strategy import replica_collectives

WHOLE_BELOW = 1 << 12
"""Variables with fewer entries are held by all devices."""

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def is_sharded(variable: Any) -> bool:
    """Whether a variable, of Keras or behind one, lies in parts."""
    return isinstance(_backing(variable), ShardedVariable)


def _backing(variable: Any) -> Any:
    is_keras = isinstance(variable, keras.Variable)
    return keras_variables.backing(variable) if is_keras else variable


def layout_for(variable: Any, strategy: Any) -> Layout | None:
    """Returns how a variable is cut, `None` if it stays whole.

    Args:
        variable: One of Keras or TensorFlow.
        strategy: The one that replicates it.
    """
    count = strategy.communicator.size
    shape = tuple(variable.shape)
    is_small = math.prod(shape) < WHOLE_BELOW
    if strategy.shard is None or count == 1 or is_small:
        return None
    is_float = tf.as_dtype(variable.dtype).name in _DTYPES
    if not is_float or getattr(variable, "overwrite_with_gradient", False):
        return None
    return Layout(shape, count)


def to_shard(
    owners: Iterable[Any], strategy: ReplicatedStrategy
) -> list[keras.Variable]:
    """Returns the variables that are to lie in parts and do not yet."""
    if strategy.shard is None:
        return []
    owners = list(owners)
    summed: set[int] = set()
    if strategy.shard == "optimizer":
        kind = keras.optimizers.Optimizer
        owners = [owner for owner in owners if isinstance(owner, kind)]
        # Each replica adds up the gradients of its samples, until they are
        # summed when the optimizer updates.
        summed = {
            id(variable)
            for owner in owners
            for variable in keras_models.accumulators(owner)
        }
    return [
        variable
        for key, variable in state.state_of(owners).items()
        if key not in summed and _is_to_shard(variable, strategy)
    ]


def _is_to_shard(
    variable: keras.Variable, strategy: ReplicatedStrategy
) -> bool:
    value = keras_variables.backing(variable)
    if value is None or is_sharded(value):
        return False
    is_here = not is_replicated(value) or value.distribute_strategy is strategy
    return (
        is_here
        and state.is_mirrored(variable)
        and not variable.overwrite_with_gradient
        and layout_for(value, strategy) is not None
    )


def shard_new(variable: keras.Variable, strategy: ReplicatedStrategy) -> None:
    """Cuts a variable that has just been made, if it is to lie in parts."""
    if strategy.shard is not None and _is_to_shard(variable, strategy):
        shard(variable, strategy)


def shard(variable: keras.Variable, strategy: ReplicatedStrategy) -> None:
    """Gives each device its part of a variable, and frees the whole."""
    old = keras_variables.backing(variable)
    layout = layout_for(old, strategy)
    assert layout is not None, "the caller has asked"
    copies = list(state.copies(old))

    def made() -> list[tf.Variable]:
        found = []
        for rank, device in enumerate(strategy.devices):
            # Each device cuts its own copy, if it has one.
            copy = copies[rank] if len(copies) > 1 else copies[0]
            with tf.device(copy.device):
                part = layout.part_of(copy.read_value(), rank)
            with tf.device(device):
                found.append(
                    tf.Variable(
                        part,
                        trainable=old.trainable,
                        name=old.name.partition(":")[0],
                    )
                )
        return found

    with tf.init_scope():
        parts = outside_of_strategies(made)
    new = ShardedVariable(strategy, parts, layout, gathered, rank_as_tensor)
    state.swap_backing(variable, old, new)


def joined(variable: Any, parts: Sequence[tf.Tensor | None]) -> Any:
    """Returns a whole tensor for a variable, of one for each of its parts."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    layout = _backing(variable).layout
    return layout.whole(tf.concat(known, 0))


def gathered(variable: ShardedVariable) -> tf.Tensor:
    """Returns, in a replica, the whole value of a variable."""
    step = steps.current_fit_step()

    @tf.custom_gradient
    def whole(part: tf.Tensor) -> Any:
        (flat,) = replica_collectives().gathered([part], rank_as_tensor())

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if step is None:
                raise NotImplementedError(
                    f"A gradient by {variable.name}, of which each device has "
                    "a part, is computed in `fit` only. Train by `fit`, with "
                    "a `train_step` of your own if you like, or replicate "
                    'with `shard="optimizer"`.'
                )
            flat = variable.layout.flat(tf.convert_to_tensor(upstream))
            return replica_collectives().scattered([flat], rank_as_tensor())[0]

        return variable.layout.whole(flat), gradient

    value = whole(variable.part.read_value())
    if step is not None:
        step.kinds.mark_equal([value])
    return value
