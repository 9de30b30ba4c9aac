"""Moves trees of tensors between devices, and says where they are.

After MLDataDevices.jl: a tensor that is on the device stays the same object,
shared tensors stay shared, and leaves that disagree are an error.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar
from typing import overload

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import DeviceError
from keras_conflux._common.trees import Leaf
from keras_conflux._common.trees import Tree
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._devices.device import short_name
from keras_conflux._replication import state
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.replicas import as_replicas

K = TypeVar("K")
V = TypeVar("V")

_COMPOSITE = tf.IndexedSlices | tf.RaggedTensor | tf.SparseTensor
_STATEFUL = state.Replicable | tf.Module


@overload
def to_device(
    tree: npt.NDArray[Any] | float, device: int | str
) -> tf.Tensor: ...
@overload
def to_device(tree: V, device: int | str) -> V: ...
def to_device(tree: Tree, device: int | str) -> Tree:
    """Returns `tree` with its tensors, arrays and numbers on a device.

    A tensor that is there already stays the same object; one from another
    device is copied, between GPUs without the host. Tensors shared within the
    tree stay shared. Dtypes are kept. Gradients flow back through it.

    Variables stay where they are, as models and optimizers hold them: their
    values are moved. Strings, which live on the host, and all other leaves that
    are no numbers, pass through. A `Replicas` becomes the list of its devices'
    values, all on this one.

    Args:
        tree: Nested dicts, lists and tuples.
        device: An index or a name, see `keras_conflux.devices`.

    Returns:
        A tree of the same structure, of `tf.Tensor`s on the device.

    Raises:
        DeviceError: If the device does not exist.
        RuntimeError: While a graph is traced, where tensors have no device.
        TypeError: If there is a model, optimizer, metric or dataset in it.

    Example:
        ```python
        batch = kc.to_device({"x": x, "y": y}, kc.devices()[1])
        print(batch["x"].device)
        ```
    """
    opened = _opened(tree, "to_device")
    return place([opened], find_devices([device]))[0]


@overload
def to_cpu(tree: tf.Tensor) -> npt.NDArray[Any]: ...
@overload
def to_cpu(tree: list[tf.Tensor]) -> list[npt.NDArray[Any]]: ...
@overload
def to_cpu(tree: dict[K, tf.Tensor]) -> dict[K, npt.NDArray[Any]]: ...
@overload
def to_cpu(tree: V) -> V: ...
def to_cpu(tree: Tree) -> Tree:
    """Returns `tree` with its tensors as NumPy arrays.

    Keras' `predict` and `get_weights` return such arrays. For tensors in the
    host's memory call `to_device(tree, "CPU:0")`.

    Scalars become NumPy scalars, strings arrays of bytes, and variables their
    values. Sparse and ragged tensors and `tf.IndexedSlices`, which NumPy does
    not have, stay as they are, on `"CPU:0"`. All else passes through. A
    `Replicas` becomes the list of its devices' values.

    Args:
        tree: Nested dicts, lists and tuples.

    Returns:
        A tree of the same structure, of NumPy arrays.

    Raises:
        RuntimeError: While a graph is traced, where tensors have no values.
        TypeError: If there is a model, optimizer, metric or dataset in it.

    Example:
        ```python
        model = build_model()
        arrays = kc.to_cpu({v.path: v for v in model.weights})
        np.savez("weights.npz", **arrays)
        ```
    """

    def on_host(leaf: Leaf) -> Any:
        leaf = _read(leaf)
        if isinstance(leaf, tf.Tensor):
            numeric = leaf.dtype not in (tf.resource, tf.variant)
            return leaf.numpy() if numeric else leaf
        if isinstance(leaf, _COMPOSITE):
            return place([leaf], [Device("CPU:0")])[0]
        return leaf

    return _once_each(on_host, _opened(tree, "to_cpu"))


def device_of(tree: Tree) -> Device | None:
    """Returns the device that the tensors and variables of `tree` are on.

    Arrays, numbers and strings are on none: they are on the host, from where
    TensorFlow takes them to any device. For int32 and bool, which it keeps on
    the host for GPUs, too, the device counts to which they were given, unless
    other leaves have one.

    Args:
        tree: Nested dicts, lists and tuples. A `Replicas`, and a replicated
            variable, are on several devices, if they have more than one.

    Returns:
        The device, or `None` if no leaf has one.

    Raises:
        DeviceError: If leaves are on different devices, naming two of them.
        RuntimeError: While a graph is traced, where tensors have no device.
        TypeError: If there is a model, optimizer, metric or dataset in it.

    Example:
        ```python
        batch = kc.to_device((x, y), kc.devices()[1])
        assert kc.device_of(batch) == kc.devices()[1]
        assert kc.device_of(x) is None  # a NumPy array
        ```
    """
    opened = trees.map_leaves(_copies, _opened(tree, "device_of"))
    placed = [
        (path, leaf, device)
        for path, leaf in trees.with_paths(opened)
        if (device := device_of_leaf(leaf)) is not None
    ]
    # tf.identity keeps these dtypes in the host's memory (identity_op.cc).
    on_host = (tf.int32, tf.bool)
    firm = [each for each in placed if each[1].dtype not in on_host] or placed
    for path, _, device in firm:
        first_path, _, first = firm[0]
        if device != first:
            raise DeviceError(
                "`device_of` takes a tree on one device. Received: "
                f"{first_path} is on {first}, {path} is on {device}. Move "
                "them together with `to_device`, or ask for each alone."
            )
    return firm[0][2] if firm else None


def move_at_once(tree: Tree, device: Device) -> Tree:
    """Moves a tree as `to_device` does, in one graph: see `place`."""
    return place([_opened(tree, "prefetch")], [device], at_once=True)[0]


def place(
    targets: Sequence[Tree], devices: Sequence[Device], *, at_once: bool = False
) -> list[Tree]:
    """Returns each of some trees with its leaves on its device.

    Devices may repeat. `at_once`, all tensors travel in one graph, for training
    loops: copies to a GPU that are made one after another wait each for the
    GPU's computation (docs/performance.md).
    """
    values = [_once_each(_value, tree) for tree in targets]
    leaving = [
        {
            id(part): part
            for leaf in trees.present(tree)
            for part in _parts(leaf)
            if device_of_leaf(part) != device
        }
        for tree, device in zip(values, devices, strict=True)
    ]
    copy = _copied_at_once if at_once else _copied
    arrived = copy(
        [list(found.values()) for found in leaving], tuple(map(str, devices))
    )
    return [
        _with_parts(tree, dict(zip(found, copies, strict=True)))
        for tree, found, copies in zip(values, leaving, arrived, strict=True)
    ]


def _copied(
    tensors: list[list[tf.Tensor]], devices: tuple[str, ...]
) -> list[list[tf.Tensor]]:
    copies = []
    for device, originals in zip(devices, tensors, strict=True):
        with tf.device(device):
            copies.append([tf.identity(tensor) for tensor in originals])
    return copies


_copied_at_once = tf.function(_copied, autograph=False, reduce_retracing=True)


def _with_parts(tree: Tree, new: dict[int, tf.Tensor]) -> Tree:
    def exchanged(leaf: Leaf) -> Any:
        parts = _parts(leaf)
        if not any(id(part) in new for part in parts):
            return leaf
        others = [new.get(id(part), part) for part in parts]
        return tf.nest.pack_sequence_as(leaf, others, expand_composites=True)

    return _once_each(exchanged, tree)


def _parts(leaf: Leaf) -> list[tf.Tensor]:
    """Returns the tensors that a leaf is made of, if these can be moved."""
    if not isinstance(leaf, tf.Tensor | _COMPOSITE) or not _is_number(leaf):
        return []
    return tf.nest.flatten(leaf, expand_composites=True)


def _read(leaf: Leaf) -> Leaf:
    """Returns the value of a variable, and all else as it is."""
    leaf = state.backing(leaf)
    return leaf.read_value() if isinstance(leaf, tf.Variable) else leaf


def _value(leaf: Leaf) -> Leaf:
    """Returns the tensor that stands for a variable, array or number."""
    leaf = _read(leaf)
    arrays = np.ndarray | np.generic | bool | int | float | complex
    if isinstance(leaf, arrays) and _is_number(leaf):
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(leaf)
    return leaf


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, int | float | complex):
        return True
    try:
        dtype = tf.as_dtype(leaf.dtype)
    except TypeError:  # dates, records
        return False
    return dtype not in (tf.string, tf.resource, tf.variant)


def device_of_leaf(leaf: Leaf) -> Device | None:
    """Returns where a tensor or variable is, `None` while a graph is traced."""
    if not tf.executing_eagerly():
        return None
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.flat_values
    if isinstance(leaf, tf.IndexedSlices | tf.SparseTensor):
        leaf = leaf.values
    if isinstance(leaf, tf.Variable):
        return short_name(leaf.device)
    if not isinstance(leaf, tf.Tensor) or not _is_number(leaf):
        return None
    # Where a tensor's op has run and where its memory is. Of a graph's output,
    # TensorFlow knows only the latter; of an int32 given to a GPU, whose
    # memory is on the host, only the former says that.
    ran, lies = short_name(leaf.device), short_name(leaf.backing_device)
    return ran if lies == "CPU:0" else lies


def _copies(leaf: Leaf) -> Any:
    """Returns the copies of a replicated variable."""
    leaf = state.backing(leaf)
    if isinstance(leaf, tf.distribute.DistributedValues):
        return list(Replicas.from_distributed(leaf))
    return leaf


def _once_each(function: Callable[[Leaf], Any], tree: Tree) -> Tree:
    """Applies `function` to each leaf once, wherever the leaf is shared."""
    results: dict[int, Any] = {}

    def result(leaf: Leaf) -> Any:
        if id(leaf) not in results:
            results[id(leaf)] = function(leaf)
        return results[id(leaf)]

    return trees.map_leaves(result, tree)


def _opened(tree: Tree, call: str) -> Tree:
    """Returns the tree with a list for each `Replicas`, if it may move."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`{call}` was called while TensorFlow traces a graph, where a "
            "tensor has no device and no value yet. Call it before or after "
            "the step. To place an op inside, write "
            "`with tf.device('GPU:1'): x = tf.identity(x)`."
        )
    for path, leaf in trees.with_paths(tree):
        if isinstance(leaf, tf.data.Dataset):
            raise TypeError(
                f"`{call}` takes trees of tensors, arrays and numbers. "
                f"Received: {path} is a dataset. For its batches one after "
                "another, see `keras_conflux.prefetch`."
            )
        if isinstance(leaf, _STATEFUL):
            raise TypeError(
                f"`{call}` takes trees of tensors, arrays and numbers. "
                f"Received: {path} is a {type(leaf).__name__}, whose variables "
                "have their places. Give it `model.weights` or "
                "`optimizer.variables`, or choose where a model lives with "
                "`keras_conflux.replicate(model, devices=['GPU:1'])`."
            )
    leaves = trees.map_leaves(as_replicas, tree)
    return trees.map_leaves(
        lambda leaf: list(leaf) if isinstance(leaf, Replicas) else leaf, leaves
    )
