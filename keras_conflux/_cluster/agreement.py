"""Sees to it that all processes are about to do the same.

Collectives meet in the order in which processes call them. If one process were
elsewhere in the program, it would meet another sum of the same shape, and both
would get a wrong number. So each says what it is about to do before it meets
the others, in a message of its own, always of one shape.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.errors import ReplicaMismatchError

_LENGTH = 256
"""How many bytes of a text are compared."""
_GROUP = (1 << 20) - 1
"""The group key of the hosts, below those of devices."""


def agree(what: str, of: Any = None) -> None:
    """Raises in all processes unless all say the same.

    Alone, it does nothing.

    Args:
        what: What this process is about to do.
        of: What it does that with. Alone, it is not described.

    Raises:
        ReplicaMismatchError: If another process says something else.
    """
    if process_count() == 1:
        return
    rows = np.zeros([process_count(), _LENGTH], np.int32)
    said_here = what if of is None else f"{what}, of {of}"
    text = _shortened(said_here.encode())
    rows[process_index(), : len(text)] = list(text)
    said = sum_of_hosts(rows)
    if (said == said[0]).all():
        return
    texts = [
        bytes(row).rstrip(b"\0").decode(errors="replace")
        for row in said.astype("uint8")
    ]
    listed = "; ".join(f"process {i}: {t}" for i, t in enumerate(texts))
    raise ReplicaMismatchError(
        f"The processes are not at the same place of the program: {listed}. "
        "All have to run the same program on the same data. If only checksums "
        "differ, the processes have drawn different batches: give shuffles a "
        "seed. What only one process shall do, such as writing a file, must "
        "not train, evaluate or reduce anything."
    )


def _shortened(text: bytes) -> bytes:
    """Returns a text that fits, and differs where the whole text does."""
    if len(text) <= _LENGTH:
        return text
    end = f"... (checksum {zlib.crc32(text)})".encode()
    return text[: _LENGTH - len(end)] + end


def sum_of_hosts(numbers: np.ndarray) -> np.ndarray:
    """Adds up an array of all processes, of a shape that all share.

    Args:
        numbers: Of int32, int64, float32 or float64.
    """
    with tf.device("CPU:0"):
        return _all_reduce()(tf.constant(numbers)).numpy()


@functools.cache
def _all_reduce() -> Callable[[tf.Tensor], tf.Tensor]:
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf.Variable(tf.constant(0), trainable=False)

    @tf.function(reduce_retracing=True)
    def run(numbers: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=numbers,
            group_size=process_count(),
            group_key=_GROUP,
            instance_key=tf.convert_to_tensor(
                counter.assign_add(1, read_value=True)
            ),
            ordering_token=[counter.handle],
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
        )

    return run
