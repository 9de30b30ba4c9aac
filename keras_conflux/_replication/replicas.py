"""Puts things on every device: models in place, values as `Replicas`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._devices.device import short_name
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_for


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
