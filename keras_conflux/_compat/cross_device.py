"""TensorFlow's reductions of replicas' values, outside of replicas."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import values

from keras_conflux._compat.tensorflow_internals import without_untrue_lines
from keras_conflux._graphs.rewriting import must_run

_ON_ONE_DEVICE = tf.distribute.ReductionToOneDevice()
_NCCL_REDUCES = {tf.float16, tf.float32, tf.float64, tf.int64}


def usual(devices: Sequence[str]) -> tf.distribute.CrossDeviceOps:
    """Returns the default reduction between devices."""
    physical = tf.config.list_physical_devices("GPU")
    are_virtual = len(tf.config.list_logical_devices("GPU")) > len(physical)
    if are_virtual or not all("GPU" in device for device in devices):
        return _ON_ONE_DEVICE
    # Packs would join tensors of several dtypes.
    return tf.distribute.NcclAllReduce(num_packs=0)


def may_be_traced_once(
    pairs: Sequence[Any],
    chosen: tf.distribute.CrossDeviceOps,
    devices: Sequence[str],
) -> bool:
    """Whether the package's own collectives may reduce in NCCL's place.

    Outside of functions TensorFlow traces NCCL's operations in each call, which
    takes longer than the reduction. All of it has to be on these devices.
    """
    devices_of = cross_device_ops.get_devices_from
    return (
        tf.executing_eagerly()
        and type(chosen) is tf.distribute.NcclAllReduce
        and all(
            isinstance(value, values.PerReplica)
            and able_to_reduce(value, chosen) is chosen
            and {*map(devices_of, (value, to))} == {tuple(devices)}
            for value, to in pairs
        )
    )


def able_to_reduce(
    value: Any, chosen: tf.distribute.CrossDeviceOps
) -> tf.distribute.CrossDeviceOps:
    """Returns the chosen reduction, or one for parts that it cannot reduce.

    TensorFlow keeps int32 on the host, and NCCL has no kernel for others. It
    takes one part from each GPU, but functions return constants of all
    replicas on one, and tensors of a graph need not have a device.
    Copies in two groups would leave out the last one of an odd number.
    """
    parts = _each(value)
    found = {tf.as_dtype(each.dtype) for each in parts}
    is_nccl = isinstance(chosen, tf.distribute.NcclAllReduce)
    in_groups = isinstance(chosen, tf.distribute.HierarchicalCopyAllReduce)
    if (
        tf.int32 in found
        or (is_nccl and not found <= _NCCL_REDUCES)
        or (is_nccl and len({each.device for each in parts}) < len(parts))
        or (in_groups and len(parts) % 2)
    ):
        return _ON_ONE_DEVICE
    return chosen


def _each(value: Any) -> tuple[Any, ...]:
    """Returns each replica's part of a value, or the value itself."""
    is_distributed = isinstance(value, values.DistributedValues)
    return value._values if is_distributed else (value,)


def kept(reduce: Callable[..., Any], *arguments: Any) -> Any:
    """Returns all results of a reduction of TensorFlow's strategy.

    A program that uses the result of one replica would leave out the ops for
    the others, and NCCL would wait for it for ever.
    """
    with without_untrue_lines():
        results = reduce(*arguments)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    for result in tf.nest.flatten(results) if graph else ():
        for each in _each(result):
            tensor = getattr(each, "values", each)
            if getattr(tensor, "graph", None) is graph:
                must_run(tensor)
    return results


def as_tensors(value: Any) -> list[Any]:
    """Returns each replica's part of a value."""

    def as_tensor(part: Any) -> Any:
        if isinstance(part, tf.IndexedSlices):
            shape = part.dense_shape
            if shape is not None:
                shape = tf.convert_to_tensor(shape)
            return tf.IndexedSlices(part.values, part.indices, shape)
        return part.read_value() if isinstance(part, tf.Variable) else part

    return [*map(as_tensor, _each(value))]


def mean_of(sums: Sequence[Any], count: int) -> list[Any]:
    """Divides each sum by the number of summands."""
    divided = cross_device_utils.divide_by_n_tensors_or_indexed_slices
    return [divided(each, count) for each in sums]


def placed(copies: Sequence[Any], value: Any, destinations: Any) -> Any:
    """Moves copies of a value from its devices to the destinations."""
    wanted = cross_device_ops.get_devices_from(destinations)
    if copies[1:] and tuple(wanted) == tuple(value._devices):
        kind: Any = values.Mirrored
        return distribute_utils.regroup(tuple(copies), kind)
    is_distributed = isinstance(destinations, values.DistributedValues)
    return cross_device_ops.simple_broadcast(
        copies[0], destinations, always_mirrored=is_distributed
    )
