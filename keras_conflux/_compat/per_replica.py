"""TensorFlow's container of one value per replica, of trees as well."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.framework import type_spec


class _Spec(values.PerReplicaSpec):
    """The spec by which `tf.function` makes a value again inside of it."""

    __slots__ = ["_devices"]

    def __init__(self, devices: Any, *specs: Any) -> None:
        super().__init__(*specs)
        self._devices = tuple(devices)

    def _serialize(self) -> Any:
        return (self._devices, *self._value_specs)

    def _from_components(self, tensor_list: Any) -> Any:
        return self.value_type(tensor_list, self._devices)


class PerReplica(values.PerReplica):
    """The `tf.distribute` type for trees of replicas, with `devices`."""

    devices: tuple[Any, ...]
    _conflux_spec: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        members = {"__slots__": [], "value_type": cls}
        cls._conflux_spec = type(f"{cls.__name__}Spec", (_Spec,), members)

    # An array of NumPy on the left leaves an operator to it.
    __array_priority__ = 100

    @property
    def _type_spec(self) -> Any:
        spec = type_spec.type_spec_from_value
        found = [tf.nest.map_structure(spec, part) for part in self._values]
        return self._conflux_spec(self.devices, *found)


def of(parts: Iterable[Any]) -> Any:
    """Returns TensorFlow's own value of one part per replica."""
    return values.PerReplica(parts)


def by_leaves(value: Any) -> Any:
    """Returns a tree of TensorFlow's own values for one of ours."""
    if not isinstance(value, PerReplica):
        return value

    def leaf(*parts: Any) -> Any:
        return None if parts[0] is None else of(map(_on, value.devices, parts))

    return tf.nest.map_structure(leaf, *value.values)


def _on(device: Any, leaf: Any) -> Any:
    """Returns a tensor or variable, or makes one on a device of all else."""
    if tf.is_tensor(leaf) or isinstance(leaf, tf.Variable):
        return leaf
    with tf.device(device):
        return tf.convert_to_tensor(leaf)


def same_everywhere(value: Any, count: int) -> Any:
    """Returns a value of replicas that all have the same, or the value."""
    if isinstance(value, values.DistributedValues):
        return value
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
    return of([tensor] * count)
