"""Puts things on every device: models in place, values as `Replicas`."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Generic
from typing import NoReturn
from typing import TypeVar
from typing import overload

import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import DeviceError
from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import per_replica
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._devices.device import short_name
from keras_conflux._replication import state
from keras_conflux._replication.strategy import current_strategy

T_co = TypeVar("T_co", covariant=True)


_HINT = (
    "It has a value for each device. Give it to a step as an argument, or "
    "write `losses[0]` for the value of the first one, or "
    '`keras_conflux.allreduce("mean", losses)[0]` for the mean, with '
    "`weight=[len(part) for part in x]` for that over samples."
)

_OF_VARIABLES = (
    "It has a variable for each device, which a step gets as an argument. For "
    "one with a copy on each device, which a step may assign, write "
    "`keras_conflux.replicate(lambda: keras.Variable(...))`."
)


class Replicas(per_replica.PerReplica, Generic[T_co]):
    """One tree per device, in device order.

    It is a `tf.distribute.DistributedValues`, which `strategy.run` and the
    other methods of a strategy over these devices take.

    `replicas[0]` and `replicas["GPU:0"]` are the tree of one device, and
    `replicas[:2]` is a list. `len` and iteration work, too. To type checkers
    `Replicas[tf.Tensor]` has a tensor per device. Conflux.jl has such ones.

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
    kind: Any = "own"
    """Internal: what a collective has made of the values, as `Given` knows."""
    is_uneven = False
    """Internal: whether they are of batches of different sizes."""
    checksum = 0
    """Internal: of several processes, the checksum of the batch of `split`."""

    def __init__(self, values: Sequence[T_co], devices: DevicesLike) -> None:
        super().__init__(values)
        self.devices = find_devices(devices)
        if len(self._values) != len(self.devices):
            raise ValueError(
                "A Replicas has one value per device. Received: "
                f"{len(self._values)} values for {len(self.devices)} devices "
                f"({', '.join(self.devices)})."
            )

    @classmethod
    def from_distributed(cls, value: Any) -> "Replicas[Any]":
        """Makes one of the values that `tf.distribute` has for each replica.

        Args:
            value: A result of `strategy.run`, or a replicated variable, of
                any `tf.distribute` strategy. Or a model, layer, optimizer or
                metric that is replicated.

        Returns:
            The value of each device. Variables become their copies, and a model
            a dict with the copy of each variable by its path.

        Raises:
            StrategyError: If a model is not replicated.
            ValueError: If `value` is not distributed, on several devices.

        Example:
            ```python
            with kc.replicate(devices=2) as strategy:
                losses = strategy.run(lambda: tf.constant(1.0))
            print(list(kc.Replicas.from_distributed(losses)))
            ```
        """
        if isinstance(value, Replicas):
            return value
        if isinstance(value, state.Replicable):
            return cls._of_copies(value)
        of_variable = getattr(value, "distribute_strategy", None)
        strategy = of_variable or current_strategy()
        local = strategy.experimental_local_results(value)
        found = None if of_variable else _devices_of(local)
        names = found or map(short_name, strategy.extended.worker_devices)
        return cls(local, [*names])

    @classmethod
    def _of_copies(cls, target: Any) -> "Replicas[Any]":
        variables = state.variables_of(target)
        strategy = state.strategy_of(variables)
        if strategy is None:
            raise StrategyError(
                f"{target!r} has a single copy of each variable. Give it to "
                "`keras_conflux.replicate` first."
            )
        copies = {state.name_of(v): state.copies(v) for v in variables}
        found: list[Any] = [
            {name: each[index] for name, each in copies.items()}
            for index in range(len(strategy.devices))
        ]
        return cls(found, strategy.devices)

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
        return per_replica.by_leaves(self)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, which: int | str) -> T_co: ...
    @overload
    def __getitem__(self, which: slice) -> list[T_co]: ...
    def __getitem__(self, which: int | slice | str) -> Any:
        if isinstance(which, str):
            return self._values[self._position(which)]
        found = self._values[which]
        return list(found) if isinstance(which, slice) else found

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._values)

    __contains__: Any = Sequence.__contains__
    __reversed__: Any = Sequence.__reversed__

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

    def __str__(self) -> str:  # which Keras shows of data it cannot take
        leaves = trees.flatten(self._values[0])
        is_batch = any(getattr(x, "ndim", 0) for x in leaves)
        use = ", for a function of `keras_conflux.withdevices`"
        return repr(self) + use * is_batch

    def __getattr__(self, name: str) -> NoReturn:
        is_of_arrays = name == "numpy" or hasattr(np.ndarray, name)
        hint = f" {_HINT}" if is_of_arrays and name[0] != "_" else ""
        if name.startswith("assign"):
            hint = f" {_OF_VARIABLES}"
        raise AttributeError(
            f"A Replicas has no {name!r}.{hint}", name=name, obj=self
        )

    def __float__(self, *_: Any) -> NoReturn:
        raise TypeError(f"A Replicas is not one number. {_HINT}")

    __int__ = __add__ = __radd__ = __float__

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
    is_variable = isinstance(leaf, tf.Variable)
    if isinstance(leaf, tf.distribute.DistributedValues) and not is_variable:
        return Replicas.from_distributed(leaf)
    return leaf


def _short(tree: Any) -> str:
    """Returns the number itself, or a description of the tree."""
    leaves = trees.flatten(tree)
    if len(leaves) != 1:
        return f"{len(leaves)} leaves"
    (leaf,) = leaves
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    is_known = isinstance(leaf, np.generic | np.ndarray | tf.Tensor)
    if not is_known or tf.is_symbolic_tensor(leaf) or leaf.shape != ():
        return trees.describe(leaf)
    if tf.as_dtype(leaf.dtype).is_floating:
        return format(float(leaf), ".6g")
    return str(np.asarray(leaf)[()])
