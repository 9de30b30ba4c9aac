"""Gives models and optimizers one copy per device, in place, and back.

The seed of `keras.random` is one that all models of a thread have in common.
Models on different devices may take turns, also within the `fit` of another.
So the variable that the seed had on each set of devices is kept, with all that
was traced over it, and gets the value whenever it is taken there again.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._replication import parts
from keras_conflux._replication import running
from keras_conflux._replication import state
from keras_conflux._replication import traced_functions
from keras_conflux._replication.replica_context import on_whole_batch
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import default_strategy
from keras_conflux._replication.strategy import is_replicated


def promote(target: Any, wanted: ReplicatedStrategy | None) -> None:
    """Gives a model or optimizer its copies, in place, with all state kept.

    Without a strategy, the present one counts, else the current one.
    """
    owners = list(state.stateful_objects(target))
    present = _present_strategy(target, owners)
    if present and wanted and present is not wanted:
        raise StrategyError(
            f"{target.name!r} is replicated by {present}, and was asked for by "
            f"{wanted}. Call `keras_conflux.unreplicate` on it first."
        )
    strategy = present or wanted or current_strategy()
    moved = [
        each
        for each in owners
        if isinstance(each, keras.Model)
        and keras_models.strategy_of(each) is not strategy
    ]
    change = f"keras_conflux.replicate({target.name})"
    running.assert_not_running(moved, change)
    waiting = _to_promote(owners)
    running.assert_not_read([variable for variable, _ in waiting], change)
    _promote_all(waiting, owners, strategy)
    _attach(owners, strategy)


def is_waiting(optimizer: Any) -> bool:
    """Whether an optimizer has variables that its replicas cannot update."""
    return bool(_to_promote(list(state.stateful_objects(optimizer))))


def promote_new_state(target: Any, strategy: ReplicatedStrategy) -> None:
    """Replicates objects added since, and the seeds of `keras.random`."""
    seeds = keras_variables.global_seed_generator()
    is_there = take_seed(seeds, strategy)
    if is_there and target is None:
        return
    owners = list(state.stateful_objects([target, seeds]))
    _promote_all(_to_promote(owners), owners, strategy)
    for owner in owners:
        if isinstance(owner, keras.optimizers.Optimizer):
            keras_models.set_optimizer_strategy(owner, strategy)


def build(
    model: keras.Model,
    spec: Any,
    strategy: ReplicatedStrategy,
    layers_alone: bool = False,
) -> None:
    """Makes the variables of a replicated model, for batches like `spec`."""
    # A call of the model may have built layers since it was replicated.
    promote_new_state(model, strategy)
    with strategy.scope(), on_whole_batch(strategy):
        keras_models.symbolic_build(model, spec, layers_alone=layers_alone)
    promote_new_state(model, strategy)


def promote_beside(
    optimizer: Any, trained: Sequence[Any]
) -> ReplicatedStrategy | None:
    """Replicates an optimizer where all that it is to update is."""
    strategy = state.replicated_by(optimizer.variables[:1])
    if strategy is not None or not trained:
        return strategy
    values = [
        keras_variables.backing(each)
        for each in trained
        if isinstance(each, keras.Variable)
    ]
    if len(values) < len(trained) or not all(map(is_replicated, values)):
        return None
    strategy = values[0].distribute_strategy
    promote(optimizer, strategy)
    return strategy


def demote(target: Any) -> None:
    """Puts a model or optimizer back on one device, with all state kept."""
    owners = list(state.stateful_objects(target))
    found = state.variables_of(target, owners)
    state.strategy_of(found)  # raises if there are several
    replicated = [v for v in found if is_replicated(keras_variables.backing(v))]
    change = f"keras_conflux.unreplicate({target.name})"
    if replicated:
        running.assert_not_held(owners, change)
        running.assert_not_read(replicated, change)
    state.add_up_accumulated(owners, in_each_process=True)
    state.remove_copies(found)
    _attach(owners, None)


def _present_strategy(
    target: Any, owners: Sequence[Any]
) -> ReplicatedStrategy | None:
    found = state.strategy_of(state.variables_of(target, owners))
    is_model = isinstance(target, keras.Model)
    attached = keras_models.strategy_of(target) if is_model else None
    if attached is not None and not isinstance(attached, ReplicatedStrategy):
        raise StrategyError(
            f"The model {target.name!r} was made under a "
            f"{type(attached).__name__}. Build it outside of that scope, "
            "or under `keras_conflux.replicate().scope()`."
        )
    return attached or found


def _attach(owners: Sequence[Any], strategy: ReplicatedStrategy | None) -> None:
    for owner in owners:
        is_model = isinstance(owner, keras.Model)
        if is_model and keras_models.strategy_of(owner) is not strategy:
            keras_models.set_strategy(owner, strategy)
            traced_functions.forget(owner)
        if isinstance(owner, keras.optimizers.Optimizer):
            keras_models.set_optimizer_strategy(
                owner, strategy or default_strategy()
            )


def _promote_all(
    waiting: Sequence[tuple[keras.Variable, bool]],
    owners: Sequence[Any],
    strategy: ReplicatedStrategy,
) -> None:
    """Gives variables copies, or parts, one after another for memory."""
    parts.cut(owners, strategy)
    if not waiting:
        return
    with tf.init_scope(), strategy.scope():
        for variable, summed in waiting:
            if not state.is_in_parts(variable):
                _promote_variable(variable, summed)


def _to_promote(owners: Sequence[Any]) -> list[tuple[keras.Variable, bool]]:
    """Returns variables that have no copies, and whether these are summed."""
    # Between updates each replica accumulates the gradient of its samples.
    summed = {id(v) for x in owners for v in keras_models.accumulators(x)}
    return [
        (variable, key in summed)
        for key, variable in state.state_of(owners).items()
        if _is_to_promote(variable, key in summed)
    ]


def _is_to_promote(variable: keras.Variable, summed: bool) -> bool:
    value = keras_variables.backing(variable)
    if value is None or not is_replicated(value):
        return value is not None
    if state.is_in_parts(value):
        return False
    if value.dtype == tf.bool and not state.is_mirrored(variable):
        return True  # has no sum
    # Made by Keras in the strategy's scope, not by `make_backing`.
    aggregates = value.aggregation in (
        tf.VariableAggregation.SUM,
        tf.VariableAggregation.MEAN,
    )
    return state.is_mirrored(variable) and (summed or aggregates)


def _promote_variable(variable: keras.Variable, summed: bool) -> None:
    old = keras_variables.backing(variable)
    value = state.copies(old)[0].read_value()
    new = keras_variables.make_backing(variable, value, summed)
    state.swap_backing(variable, old, new)
    if summed:
        # Each process has its part of the accumulated sum, until it is due.
        new.conflux_whole, new.conflux_is_local = None, True
    if not state.is_mirrored(variable):
        new.assign(value)


_former_seeds: Any = weakref.WeakKeyDictionary()
"""By seed generator and strategy, the TensorFlow variables of the seed. That
of models that are not replicated has the strategy `None`."""


def take_seed(
    seeds: keras.random.SeedGenerator, strategy: ReplicatedStrategy
) -> bool:
    """Takes the seed from where it is, if it was ever on these devices.

    If not, it is on one device afterwards, and the result is `False`.
    """
    present = state.replicated_by([seeds.state])
    if present is strategy:
        return True
    former = _former_seeds.setdefault(seeds, {})
    former[present] = keras_variables.backing(seeds.state)
    if strategy in former:
        _move_seed(seeds.state, former[present], former[strategy])
        return True
    if present is not None:
        state.remove_copies([seeds.state])
    return False


def give_back_seed() -> None:
    """Gives the seed back to a running model that is not replicated.

    Keras' loop goes on with its trace, and would not take it.
    """
    models = running.plain_models()
    if not models:
        return
    seeds = keras_variables.global_seed_generator()
    present = keras_variables.backing(seeds.state)
    plain = _former_seeds.get(seeds, {}).get(None)
    if plain is None or plain is present:
        return
    handles = {id(plain.handle)}
    if any(traced_functions.read_by_functions(m, handles) for m in models):
        _move_seed(seeds.state, present, plain)


def _move_seed(seed: Any, old: Any, new: Any) -> None:
    # Not `old` itself, which another scope than its own may be open for.
    value = state.copies(old)[0].read_value()
    with tf.init_scope():
        for copy in state.copies(new):
            copy.assign(value)
    state.swap_backing(seed, old, new)
