"""The variables of models, optimizers and metrics, and their copies."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_internals
from keras_conflux._compat import tensorflow_internals
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import is_replicated

OWNERS = (
    keras.layers.Layer
    | keras.optimizers.Optimizer
    | keras.metrics.Metric
    | keras.random.SeedGenerator
)


def owners(target: Any) -> Iterator[Any]:
    """Yields `target` and all layers, optimizers and metrics it holds."""
    seen: set[int] = set()
    waiting = [target]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set):
            waiting.extend(item)
        elif isinstance(item, OWNERS):
            yield item
            waiting.extend(vars(item).values())


def variables_of(target: Any) -> list[keras.Variable]:
    """Returns each variable once: weights, optimizer, metric and seed state.

    Args:
        target: A Keras model, layer, optimizer, metric, variable, or a tree
            of them.
    """
    found: dict[int, keras.Variable] = {}
    for variable in trees.flatten(target):
        if isinstance(variable, keras.Variable):
            found[id(variable)] = variable
    found |= _state_of(owners(target))
    return list(found.values())


def _state_of(owned_by: Iterable[Any]) -> dict[int, keras.Variable]:
    found: dict[int, keras.Variable] = {}
    for owner in owned_by:
        if isinstance(owner, keras.random.SeedGenerator):
            state = [owner.state]
        else:
            state = list(owner.variables)
            if isinstance(owner, keras.Model):
                state += owner.metrics_variables
        found.update((id(variable), variable) for variable in state)
    return found


def assert_known(target: Any, call: str) -> None:
    """Raises if something in a tree is no Keras object with variables."""
    for path, leaf in trees.with_paths(target):
        if not isinstance(leaf, OWNERS | keras.Variable):
            raise TypeError(
                f"`{call}` takes Keras models, layers, optimizers, metrics and "
                f"variables, or a tree of them. Received at {path}: a "
                f"{type(leaf).__name__}."
            )


def copies(variable: Any) -> tuple[tf.Variable, ...]:
    """Returns a variable's copies in replica order, or itself alone."""
    if isinstance(variable, keras.Variable):
        variable = keras_internals.backing(variable)
    if is_replicated(variable):
        return variable.distribute_strategy.experimental_local_results(variable)
    return (variable,)


def is_mirrored(variable: keras.Variable) -> bool:
    """Whether copies must be equal; those of a metric are added when read."""
    on_read = tf.VariableSynchronization.ON_READ
    return keras_internals.backing(variable).synchronization != on_read


def name_of(variable: Any) -> str:
    """What an error calls a variable: its path, or TensorFlow's name."""
    return getattr(variable, "path", None) or variable.name


def replicated_by(
    variables: list[keras.Variable],
) -> ReplicatedStrategy | None:
    """Returns what replicates the first replicated one of the variables."""
    for variable in variables:
        value = keras_internals.backing(variable)
        if is_replicated(value):
            return value.distribute_strategy
    return None


def strategy_of(variables: list[keras.Variable]) -> ReplicatedStrategy | None:
    """Returns the strategy that the variables are replicated by, if any.

    Raises:
        StrategyError: If they belong to several strategies, or to another
            kind of strategy.
    """
    found: ReplicatedStrategy | None = None
    for variable in variables:
        value = keras_internals.backing(variable)
        if not isinstance(value, tf.distribute.DistributedValues):
            continue
        strategy = value.distribute_strategy
        if not isinstance(strategy, ReplicatedStrategy):
            raise StrategyError(
                f"{name_of(variable)} was made under a "
                f"{type(strategy).__name__}. Build the model outside of its "
                "scope, or under `keras_conflux.replicate().scope()`."
            )
        if found is not None and strategy is not found:
            raise StrategyError(
                f"{name_of(variable)} is replicated by {strategy}, others "
                f"by {found}. Call `unreplicate` on one of them first."
            )
        found = strategy
    return found


def promote(owned_by: Sequence[Any], strategy: ReplicatedStrategy) -> None:
    """Gives each variable of some `owners` one copy a device, in place.

    A variable that has its copies already, or no value yet, is left alone.
    """
    # Between updates each replica accumulates the gradient of its samples.
    summed = {
        id(variable)
        for owner in owned_by
        for variable in keras_internals.accumulators(owner)
    }
    waiting = [
        variable
        for variable in _state_of(owned_by).values()
        if _is_to_promote(variable, id(variable) in summed)
    ]
    if waiting:
        with tf.init_scope(), strategy.scope():
            for variable in waiting:
                _promote(variable, id(variable) in summed)


def _is_to_promote(variable: keras.Variable, summed: bool) -> bool:
    value = keras_internals.backing(variable)
    if value is None or not is_replicated(value):
        return value is not None
    # Made by Keras in the strategy's scope, not by `make_backing`.
    aggregates = value.aggregation != tf.VariableAggregation.NONE
    return is_mirrored(variable) and (summed or aggregates)


def _promote(variable: keras.Variable, summed: bool) -> None:
    old = keras_internals.backing(variable)
    value = copies(old)[0].read_value()
    new = keras_internals.make_backing(variable, value, summed)
    tensorflow_internals.keep_identity(copies(old)[0], copies(new)[0])
    keras_internals.set_backing(variable, new)
    if not is_mirrored(variable):
        for copy in copies(new)[1:]:
            copy.assign(tf.zeros_like(copy))


def demote(variables: list[keras.Variable]) -> None:
    """Puts each replicated variable back on one device, in place."""
    for variable in variables:
        old = keras_internals.backing(variable)
        if not is_replicated(old):
            continue
        # A strategy's scope may be open here, but not in another thread.
        with ThreadPoolExecutor(1) as thread:
            new = thread.submit(_single, variable, old).result()
        tensorflow_internals.keep_identity(copies(old)[0], new)
        keras_internals.set_backing(variable, new)


def _single(variable: keras.Variable, old: Any) -> tf.Variable:
    with tf.device(copies(old)[0].device):
        # Reading from outside of the replicas adds up a metric's copies.
        return keras_internals.make_backing(variable, tf.convert_to_tensor(old))
