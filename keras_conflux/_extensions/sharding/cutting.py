"""The variables that lie in parts, and their cutting.

A strategy with `shard="optimizer"` keeps the state of optimizers in parts, one
with `shard="weights"` also the weights. Few entries are not worth an exchange.
"""

import math
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.contexts import Setting
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._extensions.sharding.between_processes import led as led
from keras_conflux._extensions.sharding.between_processes import note_whole
from keras_conflux._extensions.sharding.compat import ShardedVariable
from keras_conflux._extensions.sharding.compat import apart
from keras_conflux._extensions.sharding.layout import Layout
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import outside_of_strategies
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import is_replicated

WHOLE_BELOW = 1 << 12
"""Variables with fewer entries are held by all devices."""

_is_of_optimizer = Setting(False)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def layout_for(variable: Any, strategy: Any) -> Layout | None:
    """Returns how a strategy cuts a variable, `None` if it stays whole."""
    if strategy.shard is None:
        return None
    return _layout_over(variable, strategy.communicator.size)


def part_size(variable: Any, count: int) -> int | None:
    """Returns how many entries each of so many devices has, if a part."""
    layout = _layout_over(variable, count)
    return None if layout is None else layout.part_size


def _layout_over(variable: Any, count: int) -> Layout | None:
    shape = tuple(variable.shape)
    if count == 1 or math.prod(shape) < WHOLE_BELOW:
        return None
    is_float = tf.as_dtype(variable.dtype).name in _DTYPES
    if not is_float or getattr(variable, "overwrite_with_gradient", False):
        return None
    return Layout(shape, count)


def updates_parts(optimizer: Any) -> bool:
    """Whether an optimizer may be given parts in place of variables."""
    is_told = getattr(optimizer, "conflux_elementwise", False)
    return is_told or keras_optimizers.updates_each_entry(optimizer)


def refusal(optimizer: Any, shard: str) -> str | None:
    """Returns why an optimizer cannot update parts, `None` if it can."""
    of_wholes = keras_optimizers.updates_whole_tensors
    if updates_parts(optimizer) or of_wholes(optimizer):
        return None
    return (
        f"Nobody knows whether {type(optimizer).__name__} updates each entry "
        f"of a weight by itself, so it cannot train with `shard={shard!r}`. "
        "Replicate with `shard=None`, or, if it does, write "
        "`conflux_elementwise = True` in its class, read and write variables "
        "by `self.assign` and its kin, and use no shapes in `update_step`."
    )


def waiting(
    owners: Iterable[Any], strategy: ReplicatedStrategy
) -> list[keras.Variable]:
    """Returns the variables that are to lie in parts and do not yet."""
    if strategy.shard is None:
        return []
    owners, kind = list(owners), keras.optimizers.Optimizer
    optimizers = [x for x in owners if isinstance(x, kind)]
    kept = state.state_of(optimizers)
    own = [x for key, x in state.state_of(owners).items() if key not in kept]
    weights = [x for x in own if _new_layout(x, strategy) and strategy.cuts(x)]
    cut_here = {id(variable) for variable in weights}
    # A variable that is not cut has a sum of gradients to which each replica
    # adds its samples', until they are summed when the optimizer updates.
    summed = {
        id(accumulator)
        for each in optimizers
        for accumulator, variable in keras_optimizers.accumulated(each)
        if id(variable) not in cut_here and not state.is_in_parts(variable)
    }
    return weights + [
        variable
        for key, variable in kept.items()
        if key not in summed and _new_layout(variable, strategy)
    ]


def _new_layout(
    variable: keras.Variable, strategy: ReplicatedStrategy
) -> Layout | None:
    """Returns how to cut a variable, if it is to lie in parts and does not."""
    value = keras_variables.backing(variable)
    if value is None or state.is_in_parts(value):
        return None
    is_here = not is_replicated(value) or value.distribute_strategy is strategy
    may_be = is_here and state.is_mirrored(variable)
    if not may_be or variable.overwrite_with_gradient:
        return None
    return layout_for(value, strategy)  # whose shape is known before Keras'


def initialize(original: Callable, variable: Any, value: Any) -> None:
    """Cuts a weight that is made under a strategy which cuts weights."""
    original(variable, value)
    backing = keras_variables.backing(variable)
    if not is_replicated(backing) or not _is_known(value):
        return
    strategy = backing.distribute_strategy
    if not _is_of_optimizer.get() and strategy.cuts(variable):
        cut(variable, strategy)


def _is_known(value: Any) -> bool:
    """Whether a variable of this value is made outside of all functions."""
    return (
        tf.executing_eagerly()
        or callable(value)
        or tf.get_static_value(value) is not None
    )


def add_optimizer_variable(
    original: Callable,
    optimizer: Any,
    reference_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Cuts an optimizer's state of a variable of several devices."""
    with _is_of_optimizer.to(True):
        made = original(optimizer, reference_variable, *args, **kwargs)
    backing = state.backing(reference_variable)
    if is_replicated(backing):
        name = kwargs.get("name", args[0] if args else None)
        if name != "gradient_accumulator" or state.is_in_parts(backing):
            cut(made, backing.distribute_strategy)
    return made


def cut(variable: keras.Variable, strategy: ReplicatedStrategy) -> None:
    """Gives each device its part of a variable, and frees the whole.

    It does nothing to one that is not to lie in parts.
    """
    layout = _new_layout(variable, strategy)
    if layout is None:
        return
    old = keras_variables.backing(variable)
    copies = list(state.copies(old))

    def made() -> list[tf.Variable]:
        found = []
        for index, device in enumerate(strategy.devices):
            # Each device cuts its own copy, if it has one.
            copy = copies[index] if len(copies) > 1 else copies[0]
            rank = strategy.communicator.rank(index)
            with tf.device(copy.device):
                part = apart(layout.part_of(copy.read_value(), rank))
            with tf.device(device):
                name = old.name.partition(":")[0]
                found.append(tf.Variable(part, old.trainable, name=name))
        return found

    with tf.init_scope():
        parts = outside_of_strategies(made)
    new = ShardedVariable(strategy, parts, layout)
    note_whole(new, copies[0])
    state.swap_backing(variable, old, new)
