"""The memory of variables on each device, also before they are made."""

import contextlib
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._compat import keras_models
from keras_conflux._replication import parts
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import outside_of_strategies
from keras_conflux._replication.strategy import Shard


@dataclasses.dataclass(frozen=True)
class Held:
    """A variable that each device holds, or a part of it."""

    variable: keras.Variable
    cut_by: tuple[Shard, ...] = ("weights",)
    """The choices of `shard` that may leave a device a part of it."""

    def size(self, shard: Shard | None, devices: int) -> int:
        """Returns its bytes on each of so many devices."""
        strategy = state.replicated_by([self.variable])
        if strategy is not None:
            here = strategy.shard, strategy.communicator.size
            if here == (shard, devices):
                return trees.bytes_of(state.copies(self.variable)[0])
        entries = None
        if shard in self.cut_by and state.is_mirrored(self.variable):
            entries = parts.part_size(self.variable, devices)
        if entries is None:
            return trees.bytes_of(self.variable)
        return entries * tf.as_dtype(self.variable.dtype).size


def optimizers_of(model: keras.Model) -> list[Held] | None:
    """Returns the variables of a model's optimizers, if they are known."""
    optimizers = [*state.stateful_objects(model, keras.optimizers.Optimizer)]
    if not optimizers:  # the model is not compiled
        return None
    held = ((x, y) for x in optimizers for y in state.stateful_objects(x))
    inner = {id(other) for each, other in held if other is not each}
    found = [each for each in optimizers if each.built]
    for each in optimizers:
        if each.built or id(each) in inner:
            continue
        # The variables that another one trains are known when it is built.
        built = _as_built(each, model) if each is model.optimizer else None
        if built is None:
            return None
        found.append(built)
    # Sums of gradients between updates are not cut with the other state.
    sums = {
        id(variable)
        for each in state.stateful_objects(found)
        for variable in keras_models.accumulators(each)
    }
    both = "weights", "optimizer"
    return [
        Held(variable, both[:1] if key in sums else both)
        for key, variable in state.state_of(found).items()
    ]


def _as_built(optimizer: Any, model: keras.Model) -> Any:
    """Returns a copy that is built for a model, and takes no memory."""
    trained = model.trainable_variables

    def built() -> Any:
        config = optimizer.get_config()
        with tf.Graph().as_default():
            copy = type(optimizer).from_config(config)
            copy.build([_as_shape(variable) for variable in trained])
        return copy

    try:
        return outside_of_strategies(built)
    except Exception:  # of a class of the user's, which cannot be copied
        return None


def _as_shape(variable: keras.Variable) -> keras.Variable:
    """Returns a variable of the same shape, dtype and path in a graph."""
    with contextlib.ExitStack() as scopes:
        # Muon tells variables apart by their paths.
        for name in variable.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        kind: Any = {"shape": variable.shape, "dtype": variable.dtype}
        found = keras.Variable("zeros", name=variable.name, **kind)
    found.overwrite_with_gradient = variable.overwrite_with_gradient
    return found
