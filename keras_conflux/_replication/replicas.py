"""Puts things on every device: models in place, values as `Replicas`."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias
from typing import TypeVar
from typing import overload

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import StrategyError
from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_internals
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._devices.device import short_name
from keras_conflux._replication import state
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_for
from keras_conflux._replication.strategy import use

_InPlace: TypeAlias = (
    keras.layers.Layer | keras.optimizers.Optimizer | keras.metrics.Metric
)
_Keras = TypeVar("_Keras", bound=_InPlace)


class Replicas(Sequence):
    """One tree a device, in device order.

    `replicas[0]`, `replicas["GPU:0"]`, `len`, iteration and slices to a list
    give what each device has.

    Args:
        values: One tree a device.
        devices: As many devices, see `keras_conflux.devices`.
    """

    def __init__(self, values: Sequence[Tree], devices: DevicesLike) -> None:
        self._values = list(values)
        self.devices: tuple[Device, ...] = find_devices(devices)
        if len(self._values) != len(self.devices):
            raise ValueError(
                "A Replicas has one value a device. Received: "
                f"{len(self._values)} values for {len(self.devices)} devices "
                f"({', '.join(self.devices)})."
            )

    @classmethod
    def from_distributed(cls, value: Any) -> "Replicas":
        """Makes one of a `tf.distribute` per-replica value or variable."""
        strategy = getattr(value, "distribute_strategy", current_strategy())
        local = strategy.experimental_local_results(value)
        return cls(
            local, [short_name(d) for d in strategy.extended.worker_devices]
        )

    def to_distributed(self) -> Any:
        """Returns the `tf.distribute` per-replica value of a single leaf."""
        strategy = strategy_for(self.devices)
        return strategy.experimental_distribute_values_from_function(
            lambda context: self._values[context.replica_id_in_sync_group]
        )

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, which: int | slice | str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(which, str):
            return self._values[self.devices.index(find_devices(which)[0])]
        return self._values[which]

    def __repr__(self) -> str:
        leaves = trees.flatten(self._values[0])
        what = (
            _short(leaves[0]) if len(leaves) == 1 else f"{len(leaves)} leaves"
        )
        return f"Replicas of {what} on {', '.join(self.devices)}"


def as_replicas(leaf: Any) -> Any:
    """Makes a `Replicas` of a `tf.distribute` value that is no variable."""
    per_replica = isinstance(leaf, tf.distribute.DistributedValues)
    if per_replica and not isinstance(leaf, tf.Variable):
        return Replicas.from_distributed(leaf)
    return leaf


def _short(leaf: Any) -> str:
    return trees.describe(leaf) if hasattr(leaf, "shape") else repr(leaf)


@overload
def replicate(
    target: None = None, devices: DevicesLike = None
) -> ReplicatedStrategy: ...
@overload
def replicate(target: _Keras, devices: DevicesLike = None) -> _Keras: ...
@overload
def replicate(
    target: Callable[[], Any], devices: DevicesLike = None
) -> Any: ...
@overload
def replicate(target: Tree, devices: DevicesLike = None) -> Replicas: ...
def replicate(target: Any = None, devices: DevicesLike = None) -> Any:
    """Puts `target` on every device.

    What it does depends on the target:

    * nothing: returns the `ReplicatedStrategy` over the devices, for
      `with kc.replicate() as strategy:` or `strategy.scope()`;
    * a Keras model, layer, optimizer or metric: gives every variable one copy
      a device, in place and with all state kept, and returns it. A model may
      be built or not, compiled or not, trained or not: `fit`, `evaluate`,
      `predict` and `export` work on. A metric's copies count what their
      replica sees, and reading it adds them up;
    * a tree of these: each of them;
    * an array, tensor, variable, or a tree of them: returns a `Replicas` with
      one copy on each device. A variable becomes one variable a device;
    * any other callable: calls it in the strategy's scope and returns what it
      made.

    Args:
        target: See above.
        devices: See `keras_conflux.devices`. By default all for a strategy;
            for all else the devices of the open scope, else of
            `keras.distribution`, else those last given to `replicate`, else
            all.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        StrategyError: If the model belongs to another strategy.
    """
    if devices is None:
        strategy = strategy_for(None) if target is None else current_strategy()
    else:
        strategy = strategy_for(devices)
    use(strategy)
    if target is None:
        return strategy
    _check_target(target)
    held = [isinstance(leaf, _InPlace) for leaf in trees.flatten(target)]
    if all(held) and not isinstance(target, _InPlace):
        return trees.map_leaves(lambda leaf: replicate(leaf, devices), target)
    if isinstance(target, _InPlace):
        return replicate_in_place(
            target, strategy if devices is not None else None
        )
    if callable(target) and not isinstance(
        target, keras.Variable | tf.Variable
    ):
        with strategy.scope():
            return target()
    return _replicate_tree(target, strategy)


def _check_target(target: Any) -> None:
    if isinstance(target, str | int) and not isinstance(target, bool):
        raise TypeError(
            f"`replicate` takes what is to be put on every device. Received: "
            f"{target!r}. To choose devices, write "
            f"`replicate(devices={target!r})`."
        )
    for path, leaf in trees.with_paths(target):
        if isinstance(leaf, tf.data.Dataset | keras.losses.Loss):
            raise TypeError(
                f"`replicate` has no use for the {type(leaf).__name__} at "
                f"{path}: a loss has no variables, and a dataset is given to "
                "`fit` as it is, or to `keras_conflux.distribute`."
            )
    leaves = trees.flatten(target)
    models = [leaf for leaf in leaves if isinstance(leaf, _InPlace)]
    others = [leaf for leaf in leaves if not isinstance(leaf, _InPlace)]
    if models and others:
        raise TypeError(
            "`replicate` puts models in place and copies arrays, but not both "
            f"at once. Received: a {type(models[0]).__name__} beside a "
            f"{type(others[0]).__name__}."
        )


def unreplicate(target: _Keras) -> _Keras:
    """Puts a replicated model or optimizer back on one device, in place.

    All state is kept: weights, optimizer, metrics, seeds. What is not
    replicated is returned as it is.

    Args:
        target: A Keras model or optimizer.
    """
    found = state.variables_of(target)
    state.strategy_of(found)
    state.demote(found)
    _attach(target, None)
    return target


def adopt(target: Any, strategy: ReplicatedStrategy) -> None:
    """Replicates what has been added since: optimizers, metrics, layers."""
    seeds = keras_internals.global_seed_generator()
    if state.replicated_by([seeds.state]) not in (None, strategy):
        state.demote([seeds.state])
    owners = list(state.owners([target, seeds]))
    state.promote(owners, strategy)
    for owner in owners:
        if isinstance(owner, keras.optimizers.Optimizer):
            keras_internals.set_optimizer_strategy(owner, strategy)


def replicate_in_place(target: Any, wanted: ReplicatedStrategy | None) -> Any:
    """Gives a model or optimizer copies, by default on the current devices."""
    found = state.variables_of(target)
    present = state.strategy_of(found)
    if isinstance(target, keras.Model):
        attached = keras_internals.strategy_of(target)
        if isinstance(attached, ReplicatedStrategy):
            present = attached
        elif attached is not None:
            raise StrategyError(
                f"The model {target.name!r} was made under a "
                f"{type(attached).__name__}. Build it outside of that scope, "
                "or under `keras_conflux.replicate().scope()`."
            )
    if present is not None and wanted is not None and wanted is not present:
        raise StrategyError(
            f"{target.name!r} is replicated on {', '.join(present.devices)} "
            f"and was asked for on {', '.join(wanted.devices)}. Call "
            "`keras_conflux.unreplicate` on it first."
        )
    strategy = present or wanted or current_strategy()
    state.promote(list(state.owners(target)), strategy)
    _attach(target, strategy)
    return target


def _attach(target: Any, strategy: ReplicatedStrategy | None) -> None:
    for owner in state.owners(target):
        if isinstance(owner, keras.Model):
            keras_internals.set_strategy(owner, strategy)
        if isinstance(owner, keras.optimizers.Optimizer):
            keras_internals.set_optimizer_strategy(
                owner, strategy or keras_internals.default_strategy()
            )


def _replicate_tree(tree: Tree, strategy: ReplicatedStrategy) -> Replicas:
    copied = []
    for device in strategy.devices:
        with tf.device(device):
            copied.append(trees.map_leaves(_copy, tree))
    return Replicas(copied, strategy.devices)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable):
        leaf = keras_internals.backing(leaf)
    if isinstance(leaf, tf.Variable):
        return tf.Variable(leaf.read_value(), trainable=leaf.trainable)
    if isinstance(leaf, tf.Tensor):
        return tf.identity(leaf)
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float):
        return tf.convert_to_tensor(leaf)  # pyright: ignore[reportArgumentType]
    return leaf
