"""Moves each replica's part of batches to its device."""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common.trees import Tree
from keras_conflux._compat import tensorflow_internals
from keras_conflux._data import rows
from keras_conflux._fit.input.specs import loose_spec
from keras_conflux._fit.input.steps_per_execution import power_of_two
from keras_conflux._replication.strategy import ReplicatedStrategy

STAGED = 512 * 2**20
"""So many bytes a device are stacked on the host at once. It is memory that
GPUs can read directly, and a second is needed to lock a gigabyte of it."""

MOST_STACKED = 16
"""So many batches are stacked at once, as each number is traced for."""


def move(leaves: list[Any], strategy: ReplicatedStrategy) -> list[list[Any]]:
    """Moves one batch.

    Args:
        leaves: Of a global batch.
        strategy: What replicates the model.

    Returns:
        Each replica's leaves, on its device.
    """
    return _moved([leaves], strategy, stack=False)


def move_stacked(
    batches: list[list[Any]], strategy: ReplicatedStrategy
) -> list[list[Any]]:
    """Moves some batches that are alike.

    Args:
        batches: The leaves of each.
        strategy: What replicates the model.

    Returns:
        Each replica's leaves, on its device, of shape `(batches, ...)`.
    """
    size = max(size_in_bytes(batches[0]), 1)
    fitting = STAGED * len(strategy.devices) // size
    most = power_of_two(min(MOST_STACKED, fitting))
    groups = [
        _moved(batches[first : first + most], strategy, stack=True)
        for first in range(0, len(batches), most)
    ]
    if len(groups) == 1:
        return groups[0]
    parts = []
    for device, *pieces in zip(strategy.devices, *groups, strict=True):
        with tf.device(device):
            parts.append(list(map(concatenated, *pieces)))
    return parts


def concatenated(*pieces: tf.Tensor) -> tf.Tensor:
    """Concatenates along the first axis.

    TensorFlow copies element by element on GPUs, so bytes go eight at a time.
    """
    dtype = pieces[0].dtype
    sizes = [piece.shape.num_elements() or 1 for piece in pieces]
    if dtype not in (tf.uint8, tf.int8) or any(size % 8 for size in sizes):
        return tf.concat(pieces, 0)
    words = [tf.bitcast(tf.reshape(x, [-1, 8]), tf.int64) for x in pieces]
    return tf.reshape(
        tf.bitcast(tf.concat(words, 0), dtype), [-1, *pieces[0].shape[1:]]
    )


def size_in_bytes(batch: Tree) -> int:
    """Returns what the arrays and tensors of a batch take in memory."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return sum(
        leaf.dtype.size * (leaf.shape.num_elements() or 0)
        if isinstance(leaf, tf.Tensor)
        else getattr(leaf, "nbytes", 0)
        for leaf in leaves
    )


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a dense tensor that any device can hold."""
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string


def _moved(
    batches: list[list[Any]], strategy: ReplicatedStrategy, stack: bool
) -> list[list[Any]]:
    homes = tuple(map(_home, batches[0]))
    options = homes, strategy.devices, stack
    # In a graph all leaves travel at once. One after another, each would
    # wait for what its GPU is computing (GPUUtil::CopyCPUTensorToGPU).
    describe = tf.type_spec_from_value if stack else loose_spec
    specs = tuple(map(describe, batches[0]))
    return _graph(specs, len(batches), *options)(batches)


@functools.lru_cache(maxsize=256)  # so that the next `fit` traces nothing
def _graph(specs: tuple, number: int, *options: Any) -> Callable:
    return tensorflow_internals.graph_function(
        lambda batches: _split(batches, *options), [[list(specs)] * number]
    )


def _split(
    batches: list[list[Any]],
    homes: Sequence[str],
    devices: Sequence[str],
    stack: bool,
) -> list[list[Any]]:
    count = len(devices)
    parts = []
    for index, device in enumerate(devices):
        part = []
        for home, *leaves in zip(homes, *batches, strict=True):
            # Cut where it lies, so that only this replica's rows travel. What
            # is stacked on the host is in memory that GPUs can read directly.
            with tf.device(home):
                cut = [rows.part_of(x, index, count, True) for x in leaves]
                joined = tf.stack(cut) if stack else cut[0]
            with tf.device(device):
                part.append(tf.identity(joined) if is_plain(joined) else joined)
        parts.append(part)
    return parts


def _home(leaf: Any) -> str:
    return (is_plain(leaf) and leaf.device) or "CPU:0"
