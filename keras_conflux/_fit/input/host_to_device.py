"""Moves each replica's shard of a batch from the host to its device."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import short_name
from keras_conflux._fit.input.specs import relaxed_spec

STAGING_BYTES = 512 * 2**20
"""The maximum number of bytes per device that are stacked on the host at once,
in memory that GPUs can read directly: locking a gigabyte takes a second."""

MAX_STACKED = 16
"""The maximum number of batches that are stacked at once: each has a graph."""


def power_of_two(maximum: int) -> int:
    """Returns the largest power of two up to `maximum`, at least 1."""
    return 1 << max(0, maximum.bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which shards of a global batch go to which devices."""

    devices: tuple[Device, ...]
    """One per replica of this process."""
    first: int
    """The position of the first of these replicas among all."""
    count: int
    """The number of replicas of all processes."""


def move_stacked(
    batches: list[list[Any]], placement: Placement
) -> list[list[Any]]:
    """Moves some batches of the same shapes.

    Returns each replica's shards, of shapes `(batches, shard of a batch, ...)`.
    """
    size = max(size_in_bytes(batches[0]), 1)
    fitting = STAGING_BYTES * placement.count // size
    maximum = power_of_two(min(MAX_STACKED, fitting))
    groups = [
        moved(batches[first : first + maximum], placement, stack=True)
        for first in range(0, len(batches), maximum)
    ]
    return [
        [_joined(stacks, device) for stacks in zip(*parts, strict=True)]
        for device, *parts in zip(placement.devices, *groups, strict=True)
    ]


def concatenated(*tensors: tf.Tensor) -> tf.Tensor:
    """Concatenates along the first axis, bytes eight at a time.

    TensorFlow copies element by element on GPUs.
    """
    dtype, shape = tensors[0].dtype, tensors[0].shape[1:]
    size = shape.num_elements() or 1
    if dtype not in (tf.uint8, tf.int8) or size % 8:
        return tf.concat(tensors, 0)
    words = [tf.bitcast(tf.reshape(x, [-1, 8]), tf.int64) for x in tensors]
    return tf.reshape(tf.bitcast(tf.concat(words, 0), dtype), [-1, *shape])


def _joined(stacks: Sequence[tf.Tensor], device: str) -> tf.Tensor:
    """Concatenates stacks, on a device."""
    if len(stacks) == 1:
        return stacks[0]
    specs = map(_spec_of_any_number, stacks)
    return _graph_on(device, concatenated, *specs)(*stacks)


def batch_at(stack: tf.Tensor, position: int) -> tf.Tensor:
    """Returns one of the tensors that are stacked, where they are."""
    # A tensor made of an array says `localhost` in every process.
    device_of_process = str(short_name(stack.backing_device))
    take = _graph_on(
        device_of_process,
        operator.getitem,
        _spec_of_any_number(stack),
        tf.TensorSpec([], tf.int32),
    )
    return take(stack, tf.constant(position))


@functools.lru_cache(maxsize=256)
def _graph_on(
    device: str, function: Callable, *signature: tf.TensorSpec
) -> Callable:
    """Returns a function of tensors on a device, as a graph.

    Outside of graphs, TensorFlow could mix up inputs of two threads on one GPU
    (docs/notes/tensorflow-eager.md).
    """

    def call(*tensors: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            return function(*tensors)

    return tensorflow_tracing.concrete_function(call, signature)


def _spec_of_any_number(stack: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec([None, *stack.shape[1:]], stack.dtype)


def size_in_bytes(batch: trees.Tree) -> int:
    """Returns how much memory the arrays and tensors of a batch take."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return sum(trees.bytes_of(x) for x in leaves if hasattr(x, "dtype"))


def is_dense(leaf: Any) -> bool:
    """Whether a leaf is a dense tensor that any device can hold."""
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string


def moved(
    batches: list[list[Any]], placement: Placement, stack: bool = False
) -> list[list[Any]]:
    """Moves one batch, or a few. Returns each replica's shard of each leaf."""
    # Where each leaf is cut and stacked.
    places = ((is_dense(x) and x.device) or "CPU:0" for x in batches[0])
    options = tuple(places), placement, stack
    # In a graph all leaves travel at once. One after another, each would
    # wait for its GPU's computation (GPUUtil::CopyCPUTensorToGPU).
    describe = tf.type_spec_from_value if stack else relaxed_spec
    specs = tuple(map(describe, batches[0]))
    return _graph(specs, len(batches), *options)(batches)


@functools.lru_cache(maxsize=256)  # so that the next `fit` traces nothing
def _graph(specs: tuple, number: int, *options: Any) -> Callable:
    return tensorflow_tracing.concrete_function(
        lambda batches: _shard(batches, *options), [[list(specs)] * number]
    )


def _shard(
    batches: list[list[Any]],
    source_devices: Sequence[str],
    placement: Placement,
    stack: bool,
) -> list[list[Any]]:
    count = placement.count
    shards = []
    for index, device in enumerate(placement.devices, placement.first):
        shard = []
        for source, *leaves in zip(source_devices, *batches, strict=True):
            # Cut where it lies, so that only this replica's rows travel. A
            # stack on the host is in memory that GPUs can read directly.
            with tf.device(source):
                cut = [rows.shard_of(x, index, count, True) for x in leaves]
                joined = tf.stack(cut) if stack else cut[0]
            with tf.device(device):
                here = tf.identity(joined) if is_dense(joined) else joined
                shard.append(here)
        shards.append(shard)
    return shards
