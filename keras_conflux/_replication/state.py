"""The variables of models, optimizers and metrics, and their copies."""

import functools
import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common import trees
from keras_conflux._common.errors import StrategyError
from keras_conflux._common.waiting import DaemonCall
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat.replicated_variables import InParts
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._replication import traced_functions
from keras_conflux._replication.across_processes import run_everywhere
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.replica_context import replica_rank
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import is_replicated

Replicable: TypeAlias = (
    keras.layers.Layer
    | keras.optimizers.Optimizer
    | keras.metrics.Metric
    | keras.random.SeedGenerator
)


def stateful_objects(target: Any, kind: Any = Replicable) -> Iterator[Any]:
    """Yields `target` and all that it holds of a kind, such as optimizers."""
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
        elif isinstance(item, Replicable):
            if isinstance(item, kind):
                yield item
            waiting.extend(vars(item).values())


def variables_of(
    target: Any, owners: Iterable[Any] | None = None
) -> list[keras.Variable]:
    """Returns each variable once: weights, optimizer, metric and seed state.

    The owners are its `stateful_objects`, where they are known already.
    """
    leaves = trees.flatten(target)
    found = {id(x): x for x in leaves if _is_variable(x)}
    found |= state_of(stateful_objects(target) if owners is None else owners)
    return list(found.values())


def state_of(owners: Iterable[Any]) -> dict[int, keras.Variable]:
    """Returns, by id, the variables that some stateful objects have."""
    found: dict[int, keras.Variable] = {}
    for owner in owners:
        if isinstance(owner, keras.random.SeedGenerator):
            state = [owner.state]
        else:
            state = list(owner.variables)
            if isinstance(owner, keras.Model):
                state += [*_metrics_variables(owner), *adopted(owner)]
        found.update((id(variable), variable) for variable in state)
    return found


def _metrics_variables(model: keras.Model) -> list[keras.Variable]:
    # A model's own `metrics` may read attributes that its own `compile` has yet
    # to set. They are asked for again when the model runs.
    try:
        return model.metrics_variables
    except AttributeError:
        return []


_adopted: Any = weakref.WeakKeyDictionary()


def adopt(model: keras.Model, variables: Iterable[keras.Variable]) -> None:
    """Counts variables that only a model's steps know among its own."""
    _adopted.setdefault(model, []).extend(variables)


def adopted(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that only a model's steps know."""
    return [*_adopted.get(model, ())]


def _is_variable(leaf: Any) -> bool:
    """Whether it is a variable of Keras', or a TensorFlow's with copies."""
    return isinstance(leaf, keras.Variable) or is_replicated(leaf)


def assert_known(target: Any, call: str) -> None:
    """Raises if a leaf of a tree neither has variables nor is one."""
    for path, leaf in trees.with_paths(target):
        if not isinstance(leaf, Replicable) and not _is_variable(leaf):
            raise TypeError(
                f"`{call}` takes Keras models, layers, optimizers, metrics and "
                "variables, `tf.Variable`s made in `keras_conflux.replicate()"
                f".scope()`, or a tree of them. Received: {path} is a "
                f"{type(leaf).__name__}."
            )


def copies(variable: Any) -> tuple[tf.Variable, ...]:
    """Returns a variable's copies in replica order, or itself alone."""
    variable = backing(variable)
    if is_replicated(variable):
        return variable.distribute_strategy.experimental_local_results(variable)
    return (variable,)


def backing(variable: Any) -> Any:
    """Returns the variable of TensorFlow behind one of Keras, or itself."""
    is_keras = isinstance(variable, keras.Variable)
    return keras_variables.backing(variable) if is_keras else variable


def is_in_parts(variable: Any) -> bool:
    """Whether each device has a part of a variable, and none a copy."""
    return isinstance(backing(variable), InParts)


def own_copy(variable: Any) -> tf.Variable:
    """Returns the running replica's copy, or its part, of a variable."""
    found = copies(variable)
    return found[replica_index() if len(found) > 1 else 0]


def is_mirrored(variable: Any) -> bool:
    """Whether copies must be equal; those of a metric are added when read."""
    on_read = tf.VariableSynchronization.ON_READ
    return backing(variable).synchronization != on_read


def is_sum(value: Any) -> bool:
    """Whether the value of a TensorFlow variable is the sum of its copies."""
    adds = is_replicated(value) and not is_mirrored(value)
    return adds and value.aggregation == tf.VariableAggregation.SUM


def name_of(variable: Any) -> str:
    """Returns the name of a variable in errors: its path, or TensorFlow's."""
    return getattr(variable, "path", None) or variable.name


def replicated_by(variables: list[keras.Variable]) -> ReplicatedStrategy | None:
    """Returns the strategy of the first replicated one of the variables."""
    replicated = filter(is_replicated, map(backing, variables))
    return next((each.distribute_strategy for each in replicated), None)


def strategy_of(variables: list[keras.Variable]) -> ReplicatedStrategy | None:
    """Returns the one strategy that replicates variables, if any."""
    found: ReplicatedStrategy | None = None
    for variable in variables:
        value = backing(variable)
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


def swap_backing(variable: keras.Variable, old: Any, new: Any) -> None:
    """Puts another TensorFlow variable, with the value, behind Keras'."""
    tensorflow_internals.keep_identity(copies(old)[0], copies(new)[0])
    keras_variables.set_backing(variable, new)
    traced_functions.note_swap(copies(old), copies(new))


def remove_copies(variables: Sequence[keras.Variable]) -> None:
    """Puts each variable that is replicated back on one device."""
    for variable in variables:
        old = keras_variables.backing(variable)
        if not is_replicated(old):
            continue
        # A strategy's scope may be open here, but not in another thread.
        made = DaemonCall(functools.partial(_single_copy, variable, old))
        swap_backing(variable, old, made.result())


def _single_copy(variable: keras.Variable, old: Any) -> tf.Variable:
    with tf.device(copies(old)[0].device):
        # Reading from outside of the replicas adds up a metric's copies.
        return keras_variables.make_backing(variable, tf.convert_to_tensor(old))


def add_up_accumulated(
    owners: Iterable[Any], in_each_process: bool = False
) -> None:
    """Moves all accumulated gradients to the first replica of all processes.

    All processes call this. Or each one's first replica gets it, to be alone.
    """
    if process_count() == 1:
        return
    found = [
        variable
        for owner in owners
        for variable in keras_models.accumulators(owner)
        if is_replicated(keras_variables.backing(variable))
        and not is_in_parts(variable)  # of which each is a sum already
    ]
    if not found:
        return
    strategy = strategy_of(found) or current_strategy()
    by_replica = list(zip(*map(copies, found), strict=True))

    def one_replica() -> None:
        mine = by_replica[replica_index()]
        values = [copy.read_value() for copy in mine]
        sums = replica_collectives().all_reduce("sum", values)
        place = replica_index() if in_each_process else replica_rank()
        for copy, total in zip(mine, sums, strict=True):
            copy.assign(total if place == 0 else tf.zeros_like(total))

    one_replica.__qualname__ = f"adding up {len(found)} accumulated gradients"
    run_everywhere(one_replica, strategy)()
