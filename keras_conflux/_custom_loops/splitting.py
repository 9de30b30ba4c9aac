"""Splits batches of a custom loop over the devices."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias
from typing import TypeVar
from typing import overload

import numpy.typing as npt
import tensorflow as tf

from keras_conflux._common import arguments
from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._custom_loops.prefetcher import run_ahead
from keras_conflux._data.batches import Batches
from keras_conflux._data.transfer import device_of_leaf
from keras_conflux._data.transfer import place
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_over

Array: TypeAlias = npt.NDArray[Any] | tf.Tensor
Parts: TypeAlias = Replicas[tf.Tensor]
V = TypeVar("V")


@overload
def split(batch: Array, devices: DevicesLike = None) -> Parts: ...
@overload
def split(
    batch: tuple[Array, Array], devices: DevicesLike = None
) -> tuple[Parts, Parts]: ...
@overload
def split(
    batch: tuple[Array, Array, Array], devices: DevicesLike = None
) -> tuple[Parts, Parts, Parts]: ...
@overload
def split(
    batch: tuple[V, ...], devices: DevicesLike = None
) -> tuple[Replicas[V], ...]: ...
@overload
def split(batch: V, devices: DevicesLike = None) -> Replicas[V]: ...
def split(batch: Tree, devices: DevicesLike = None) -> Any:
    """Splits a batch along its first axis, one part per device.

    Parts are contiguous and in device order; the first ones get one sample
    more where the count does not divide. With fewer samples than devices the
    last devices get none. FluxDistributed.jl gives one part to each device,
    too.

    Args:
        batch: A tree of arrays or tensors of shape `(batch, ...)`.
        devices: See `keras_conflux.devices`. Default: the devices of the
            open scope, else of `keras.distribution`, else all.

    Returns:
        A `Replicas`; a tuple of them if `batch` is a tuple, as `(x, y)` is.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        ValueError: If a leaf has no first axis, or if the leaves have
            different numbers of samples.

    Example:
        ```python
        parts = kc.split(np.arange(10), devices=4)
        print([len(part) for part in parts])  # [3, 3, 2, 2]

        inputs, targets = kc.split((x, y))
        ```
    """
    return _split(batch, _devices(devices))


@overload
def distribute(
    dataset: Iterable[Array], devices: DevicesLike = None, *, ahead: int = 0
) -> Batches[Parts]: ...
@overload
def distribute(
    dataset: Iterable[tuple[Array, Array]],
    devices: DevicesLike = None,
    *,
    ahead: int = 0,
) -> Batches[tuple[Parts, Parts]]: ...
@overload
def distribute(
    dataset: Iterable[Any], devices: DevicesLike = None, *, ahead: int = 0
) -> Batches[Any]: ...
def distribute(
    dataset: Iterable[Any], devices: DevicesLike = None, *, ahead: int = 0
) -> Batches[Any]:
    """Splits the batches of `dataset`, each as `split` does.

    Args:
        dataset: A batched `tf.data.Dataset` or any iterable of batches. A
            generator, or another iterator, has one epoch.
        devices: See `keras_conflux.devices`. Default: the devices of the
            open scope, else of `keras.distribution`, else all.
        ahead: The number of batches that may wait on the devices, drawn and
            split by a thread as in `keras_conflux.prefetch`. With 0 there is no
            thread, and each batch is drawn when it is asked for.

    Returns:
        An iterable over the results of `split`, which are tuples of two
        `Replicas` for batches `(x, y)`. Iterate over it once per epoch. `len`
        is the number of batches, where `dataset` tells it.

    Raises:
        DeviceError: If the devices do not exist, repeat or are mixed.
        TypeError: If `dataset` cannot be iterated over.
        ValueError: If `ahead` is negative. While it is iterated over, if a
            batch cannot be split, as `split` says, or if `dataset` is an
            iterator that has ended.

    Example:
        ```python
        model = kc.replicate(build_model())
        predict = kc.withdevices(model)
        batches = kc.distribute(dataset, ahead=2)
        for epoch in range(2):
            for inputs, targets in batches:
                outputs = predict(inputs)
        ```
    """
    arguments.assert_batches(dataset)
    what = "a number of batches, or 0 to move each when it is asked for"
    arguments.assert_count("ahead", ahead, what, least=0)
    chosen = _devices(devices)
    is_ahead = ahead > 0

    def parts(batch: Tree) -> Any:
        return _split(batch, chosen, at_once=is_ahead)

    if is_ahead:
        return Batches(dataset, lambda source: run_ahead(source, parts, ahead))
    return Batches(dataset, lambda source: map(parts, source))


def _devices(devices: DevicesLike) -> tuple[Device, ...]:
    strategy = current_strategy() if devices is None else strategy_over(devices)
    return strategy.devices


def _split(
    batch: Tree, devices: tuple[Device, ...], *, at_once: bool = False
) -> Any:
    rows.assert_has_samples(batch)
    communicator = strategy_over(devices).communicator
    cut = [
        _cut(batch, communicator.rank(index), communicator.size)
        for index in range(len(devices))
    ]
    parts = place(cut, devices, at_once=at_once)
    is_uneven = rows.sample_count(batch) % communicator.size > 0

    def replicas(parts: Sequence[Tree]) -> Replicas[Any]:
        found = Replicas(parts, devices)
        found.is_uneven = is_uneven
        return found

    if isinstance(batch, tuple):
        return tuple(map(replicas, zip(*parts, strict=True)))
    return replicas(parts)


def _cut(batch: Tree, index: int, count: int) -> Tree:
    def cut(leaf: Any) -> Any:
        # Where it is, so that only this replica's rows travel.
        with tf.device(device_of_leaf(leaf) or "CPU:0"):
            return rows.shard_of(leaf, index, count)

    return trees.map_leaves(cut, batch)
