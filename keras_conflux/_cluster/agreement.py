"""Compares the next actions of processes, and exchanges small messages.

Collectives meet in the order in which processes call them, and would meet
others of the same shape. So each process announces its next action in a message
of its own. All raise a `ReplicaMismatchError` if one does something else.
"""

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.failures import of_all_processes
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import arguments
from keras_conflux._common.errors import ConfluxError
from keras_conflux._common.errors import ProcessError
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.trees import size_of
from keras_conflux._common.waiting import DEFAULT_STEP_TIMEOUT
from keras_conflux._common.waiting import DaemonCall
from keras_conflux._common.waiting import step_timeout

_LENGTH = 256
"""How many bytes of what a process is about to do an error shows."""
_GROUP = (1 << 20) - 1
"""The group key of the processes, below the devices' keys."""
_BATCHES = re.compile(r", of \(samples| with the checksums")
"""Where a text goes on to the batches of a call."""
_IN_TURN = 4
"""How many keys take turns. No process is two collectives ahead of another."""
_SIZES = 8_388_593
"""The largest prime below 2**23, so that keys have 31 bits."""


def assert_same_place(what: str, seconds: float | None = None) -> None:
    """Raises in all processes unless all are at the same place of the program.

    Others are waited for as long as for a step, or these seconds.
    """
    if process_count() == 1:
        return
    with errors_reported_to_all(what):
        own = _shortened(what.encode())
        if _differ(own, seconds):
            raise _mismatch(gather_contents(own))


def barrier(timeout: float = DEFAULT_STEP_TIMEOUT) -> None:
    """Waits until all processes have come here.

    All processes call it equally often. Alone, it returns at once.

    Args:
        timeout: The seconds to wait for the other processes.

    Raises:
        ProcessError: If one does not come in time, has ended or has failed.
        ReplicaMismatchError: If one is about to do something else, as `fit`.

    Example:
        ```python
        if kc.process_index() == 0:
            np.save("prepared.npy", x)
        kc.barrier()
        prepared = np.load("prepared.npy")
        ```
    """
    arguments.assert_seconds("timeout", timeout)
    # A barrier of TensorFlow's coordination service would wait for ever where
    # the network is cut. A collective ends when heartbeats do.
    assert_same_place("a barrier", seconds=timeout)


def all_gather_json(what: str, own: Any) -> list[Any]:
    """Returns JSON values of all processes, in their order."""
    if process_count() == 1:
        return [own]
    return _gather_values(what, _as_json(own))


class Comparable:
    """A value for JSON to hold, and the one to compare, if another."""

    def __init__(self, value: Any, compared: Any = None) -> None:
        self.text = _as_json(value)
        text = self.text if compared is None else _as_json(compared)
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def gather_if_different(what: str, own: Comparable) -> list[Any] | None:
    """Returns the values of all, or `None` if their digests are equal."""
    digests = all_gather_json(what, own.digest)
    if all(each == digests[0] for each in digests):
        return None
    return _gather_values(f"what differs at {what}", own.text)


def _as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _gather_values(what: str, text: str) -> list[Any]:
    """Returns the values in the JSON of all processes at the same place."""
    with errors_reported_to_all(what):
        own = f"{what}\n{text}".encode()
        count = process_count()
        texts = gather_contents(own) if _differ(own) else [own] * count
        parts = [each.partition(b"\n") for each in texts]
        if any(part[:2] != parts[0][:2] for part in parts):
            raise _mismatch(texts)
        return [json.loads(part[2]) for part in parts]


def broadcast_bytes(root: int, own: bytes, length: int) -> bytes:
    """Returns so many bytes of one of the processes in all of them."""
    words = _words(own if process_index() == root else b"", length)
    return sum_over_processes(words).tobytes()[:length]


def all_gather_bytes(own: bytes) -> list[bytes]:
    """Returns the bytes of all processes, which have equally many."""
    rows = gather_rows(_words(own, len(own)))
    return [row.tobytes()[: len(own)] for row in rows]


def _words(content: bytes, length: int) -> np.ndarray:
    """Returns bytes, filled up to so many, as numbers that can be summed."""
    return np.frombuffer(content.ljust(length // 4 * 4 + 4, b"\0"), np.int32)


def gather_rows(own: np.ndarray) -> np.ndarray:
    """Returns the arrays of all processes, which share their shape, as rows."""
    rows = np.zeros([process_count(), *own.shape], own.dtype)
    rows[process_index()] = own
    # A sum with zeros is bitwise the array of one process.
    return sum_over_processes(rows)


def _differ(text: bytes, seconds: float | None = None) -> bool:
    """Whether processes say different texts. Each message begins with this.

    A digest travels along a tree, in the logarithm of the processes' number.
    """
    digest = hashlib.blake2b(text, digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    bounds = np.array([number, -number], np.int64)
    largest, smallest = _waited_for(_largest(), bounds, seconds)
    return largest != -smallest


def _rounds(index: int, count: int) -> list[tuple[int, int]]:
    """Returns the number of each round, and the lower process of a pair.

    In a round, processes whose distance is a power of two exchange numbers. The
    processes past the last power of two give theirs first, and get all last.
    """
    levels = count.bit_length() - 1
    inner = 1 << levels  # the last power of two
    here = index % inner
    first = [(levels, here)] if here + inner < count else []
    last = [(levels + 1, here)] if first else []
    pairs = [(each, index & ~(1 << each)) for each in range(levels)]
    return [*first, *(pairs if index < inner else []), *last]


def gather_contents(own: bytes) -> list[bytes]:
    """Returns bytes of all processes, in their order, of any lengths."""
    lengths = gather_rows(np.array(len(own)))
    found = all_gather_bytes(own.ljust(lengths.max()))
    return [x[:length] for x, length in zip(found, lengths, strict=True)]


def _mismatch(texts: list[bytes]) -> ConfluxError:
    """Returns an error that lists the actions of processes."""
    actions = [x.split(b"\n")[0].decode(errors="replace") for x in texts]
    listed = "; ".join(f"process {i}: {each}" for i, each in enumerate(actions))
    calls = {_BATCHES.split(action)[0] for action in actions}
    if len(calls) == 1:
        way = (
            'brings its own part, write `replicate(model, data="local")`'
            if calls.pop().startswith("execution")  # of `fit` and its like
            else "gives `split` or `distribute` a part that "
            "`keras_conflux.shard` returns, leave that out"
        )
        error = ReplicaMismatchError(
            f"The processes have drawn different batches: {listed}. If each "
            f"process {way}. If each has all of the data, use the same batch "
            "size, give shuffles the same seed, and sort lists of files. Keras "
            "draws ahead from generators, of which some batches are lost."
        )
        return of_all_processes(error)
    return ReplicaMismatchError(
        f"The processes are not at the same place of the program: {listed}. "
        "All have to run the same program, on as many devices, and to stop "
        "together. Save in all: the first one writes. One alone must not save, "
        "train, evaluate or reduce, nor read weights that `shard` has cut."
    )


def _shortened(text: bytes) -> bytes:
    """Returns a text that fits, and differs where the whole text does."""
    if len(text) <= _LENGTH:
        return text
    end = f"... (checksum {zlib.crc32(text)})".encode()
    return text[: _LENGTH - len(end)] + end


def sum_over_processes(numbers: np.ndarray) -> np.ndarray:
    """Returns the sum of all processes' arrays, which share their shape."""
    add = _collective("Add", process_count(), _GROUP)
    found = _waited_for(add, numbers.ravel())  # as keys come back
    return found.reshape(numbers.shape)


def _waited_for(
    collective: Callable[[tf.Tensor], tf.Tensor],
    numbers: np.ndarray,
    seconds: float | None = None,
) -> np.ndarray:
    """Returns the result of a collective of all processes, within some time."""

    def run() -> np.ndarray:
        with tf.device("CPU:0"):
            return collective(tf.constant(numbers)).numpy()

    call = DaemonCall(run)
    seconds = step_timeout() if seconds is None else seconds
    if not call.wait(seconds):
        call.abandon()
        raise ProcessError(
            f"process {process_index()} has waited for {seconds:g} s for "
            "another process, which lives but has not come to the same place "
            "of the program. It may wait for its data, or for something that "
            "does not end. If it may take that long, set the environment "
            "variable CONFLUX_STEP_TIMEOUT to more seconds, or give `barrier` "
            "a longer `timeout`."
        )
    return call.result()


@functools.cache
def _largest() -> Callable[[tf.Tensor], tf.Tensor]:
    count = process_count()
    pairs = _rounds(process_index(), count)
    keys = [_GROUP - 1 - number * count - lower for number, lower in pairs]
    return _collective("Max", 2, *keys)


@functools.cache
def _collective(
    merge_op: str, size: int, *keys: int
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that reduces in one group of a size after another."""
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf.Variable(tf.constant(0), trainable=False)

    @tf.function(reduce_retracing=True, autograph=False)
    def run(numbers: tf.Tensor) -> tf.Tensor:
        instance = next_key(counter, size_of(numbers), numbers.dtype)
        for key in keys:
            numbers = tf.raw_ops.CollectiveReduceV2(
                input=numbers,
                group_size=size,
                group_key=key,
                instance_key=instance,
                ordering_token=[counter.handle],
                merge_op=merge_op,
                final_op="Id",
                communication_hint="ring",
            )
        return numbers

    return run


def next_key(
    counter: tf.Variable, size: Any, dtype: tf.DType, lane: int = 0
) -> tf.Tensor:
    """Counts a collective, and returns the key by which TensorFlow matches it.

    TensorFlow keeps some 1 kB for each key that it has seen. So keys come back,
    for tensors of one dtype and size, which TensorFlow divides into chunks when
    it first sees the key. Lane 1 is for collectives between others' counters.
    """
    turn = tf.math.floormod(counter.assign_add(1, read_value=True), _IN_TURN)
    kind = (size % _SIZES * 32 + dtype.as_datatype_enum) * 2 + lane
    return kind * _IN_TURN + turn
