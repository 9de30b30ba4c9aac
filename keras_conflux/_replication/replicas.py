"""Puts things on every device: models in place, values as `Replicas`."""

from collections.abc import Sequence
from typing import Any
from typing import NoReturn
from typing import TypeVar
from typing import overload

import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import DeviceError
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._devices.device import short_name
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_for

T_co = TypeVar("T_co", covariant=True)


_HINT = (
    "It has a value for each device: write `losses[0]` for the value of the "
    'first one, or `keras_conflux.allreduce("mean", losses)[0]` for the mean.'
)


class Replicas(Sequence[T_co]):
    """One tree per device, in device order.

    `replicas[0]` and `replicas["GPU:0"]` are what one device has, and
    `replicas[:2]` is a list. `len` and iteration work, too. For type checkers
    `Replicas[tf.Tensor]` has one tensor per device. Conflux.jl has such a
    container.

    An index that is too large raises `IndexError`, and a device that has no
    part of it `DeviceError`. It is not one number: `float(replicas)` and
    `replicas.numpy()` raise an error that says what to write.

    Args:
        values: One tree per device.
        devices: As many devices, see `keras_conflux.devices`.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        ValueError: If there are not as many values as devices.

    Example:
        ```python
        rates = kc.Replicas([0.1, 0.2], devices=2)
        print(rates)  # Replicas of 0.1, 0.2 on GPU:0, GPU:1
        print(rates.devices, rates[1])

        double = kc.withdevices(lambda rate: 2 * rate)
        print(list(double(rates)))
        ```
    """

    devices: tuple[Device, ...]
    """The device of each value, in order."""

    def __init__(self, values: Sequence[T_co], devices: DevicesLike) -> None:
        self._values = list(values)
        self.devices = find_devices(devices)
        if len(self._values) != len(self.devices):
            raise ValueError(
                "A Replicas has one value per device. Received: "
                f"{len(self._values)} values for {len(self.devices)} devices "
                f"({', '.join(self.devices)})."
            )

    @classmethod
    def from_distributed(cls, value: Any) -> "Replicas[Any]":
        """Makes one of a `tf.distribute` per-replica value or variable.

        Args:
            value: What `strategy.run` returned, or a replicated variable, of
                any `tf.distribute` strategy.

        Returns:
            What each device has. Variables become their copies.

        Raises:
            ValueError: If `value` is not distributed, and there are several
                devices.

        Example:
            ```python
            with kc.replicate(devices=2) as strategy:
                losses = strategy.run(lambda: tf.constant(1.0))
            print(list(kc.Replicas.from_distributed(losses)))
            ```
        """
        of_variable = getattr(value, "distribute_strategy", None)
        strategy = of_variable or current_strategy()
        local = strategy.experimental_local_results(value)
        found = None if of_variable else _devices_of(local)
        names = found or map(short_name, strategy.extended.worker_devices)
        return cls(local, list(names))

    def to_distributed(self) -> Any:
        """Returns the `tf.distribute` per-replica value, for `strategy.run`.

        Returns:
            A per-replica value; of trees, a tree of these.

        Example:
            ```python
            (parts,) = kc.split((x,), devices=2)
            strategy = kc.replicate(devices=2)
            sums = strategy.run(tf.reduce_sum, (parts.to_distributed(),))
            ```
        """
        strategy = strategy_for(self.devices)
        return strategy.experimental_distribute_values_from_function(
            lambda context: self._values[context.replica_id_in_sync_group]
        )

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, which: int | str) -> T_co: ...
    @overload
    def __getitem__(self, which: slice) -> list[T_co]: ...
    def __getitem__(self, which: int | slice | str) -> Any:
        if isinstance(which, str):
            return self._values[self._position(which)]
        return self._values[which]

    def _position(self, name: str) -> int:
        device = find_devices([name])[0]
        if device not in self.devices:
            raise DeviceError(
                f"Nothing of this Replicas is on {device}. Its devices are: "
                f"{', '.join(self.devices)}."
            )
        return self.devices.index(device)

    def __repr__(self) -> str:
        parts = [_short(value) for value in self._values]
        shown = parts[:1] if len(set(parts)) == 1 else parts
        return f"Replicas of {', '.join(shown)} on {', '.join(self.devices)}"

    def __getattr__(self, name: str) -> NoReturn:
        is_of_arrays = name == "numpy" or hasattr(np.ndarray, name)
        hint = f" {_HINT}" if is_of_arrays and name[0] != "_" else ""
        raise AttributeError(
            f"A Replicas has no {name!r}.{hint}", name=name, obj=self
        )

    # So `tf.function` and `tf.nest` know what it is made of.
    def __tf_flatten__(self) -> tuple[Any, tuple[T_co, ...]]:
        return self.devices, tuple(self._values)

    @classmethod
    def __tf_unflatten__(cls, devices: Any, values: Any) -> "Replicas[Any]":
        return cls(values, devices)

    def __float__(self) -> NoReturn:
        raise TypeError(f"A Replicas is not one number. {_HINT}")

    __int__ = __float__

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"A Replicas is not one number. {_HINT}")
        return str(self)


def _devices_of(values: Sequence[Any]) -> list[Device] | None:
    """Returns the device of each value, if they are on as many devices."""
    names = [getattr(value, "device", None) for value in values]
    found = [short_name(name) for name in names if name]
    return found if len(set(found)) == len(names) else None


def as_replicas(leaf: Any) -> Any:
    """Makes a `Replicas` of a `tf.distribute` value that is no variable."""
    per_replica = isinstance(leaf, tf.distribute.DistributedValues)
    if per_replica and not isinstance(leaf, tf.Variable):
        return Replicas.from_distributed(leaf)
    return leaf


def _short(tree: Any) -> str:
    """Returns the number itself, or what a tree is like."""
    leaves = trees.flatten(tree)
    if len(leaves) != 1:
        return f"{len(leaves)} leaves"
    (leaf,) = leaves
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    is_known = isinstance(leaf, np.generic | np.ndarray) or (
        isinstance(leaf, tf.Tensor) and hasattr(leaf, "numpy")
    )
    if not is_known or leaf.shape != ():
        return trees.describe(leaf)
    if tf.as_dtype(leaf.dtype).is_floating:
        return format(float(leaf), ".6g")
    return str(leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf)
