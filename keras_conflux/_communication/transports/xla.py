"""Reduces, scatters and gathers inside XLA programs, between GPUs.

It also counts the threads that executions of these programs leave.
"""

import functools
import math
import resource
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._common.user_warnings import warn
from keras_conflux._communication.transports.in_graph import in_shape_of
from keras_conflux._communication.transports.ops import SUM
from keras_conflux._communication.transports.ops import Extreme
from keras_conflux._communication.transports.ops import Op
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat import tensorflow_xla
from keras_conflux._compat.tensorflow_internals import own_variable
from keras_conflux._devices.device import Device

_GATHERS, _SCATTERS = 1 << 20, 1 << 21
"""The numbers from which channels are counted, far from TensorFlow's own."""
CHECKED_EVERY = 64
"""After how many executions threads are counted again."""


class XlaNccl:
    """Collectives that XLA lowers to NCCL's.

    NCCL matches them by the order in which programs run them. XLA orders
    independent collectives as it likes, and leaves out those that nothing
    needs. Where the programs of a group are not the same, each collective
    depends on the one before: they are `in_order`.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        rank: Callable[[int], int],
        size: int,
        group_key: int,
        in_order: bool,
    ) -> None:
        self._rank = rank
        self._size = size
        self._group_key = group_key
        self._told: weakref.WeakSet = weakref.WeakSet()
        self._latest = [own_variable(each, 0.0) for each in devices]
        self._are_apart = self.in_order = in_order

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, call: str
    ) -> tf.Tensor:
        """See `Communicator.all_reduce`."""
        if not self.in_order:
            return self._reduced(tensor, index, op)
        # An entry of the previous result travels along. It is kept in a
        # variable, so it comes out of branches, loops and functions. XLA
        # removes other dependencies, such as barriers, before it orders.
        latest = self._latest[index]
        flat = tf.reshape(tensor, [-1])
        before = tf.cast(latest.read_value(), flat.dtype)
        reduced = self._reduced(tf.concat([flat, [before]], 0), index, op)
        latest.assign(tf.cast(reduced[-1], latest.dtype))
        return in_shape_of(tensor, reduced[:-1])

    @property
    def moves_parts(self) -> bool:
        """Whether it can send a replica the parts that it needs alone."""
        # Between processes, all of them are links of one chain: all-reduces.
        return tensorflow_xla.has_module_calls() and not self._are_apart

    def reduce_scatter(
        self,
        flat: tf.Tensor,
        dtype: tf.DType,
        rank: Callable[[], Any],
        call: int,
    ) -> tf.Tensor:
        """Returns this replica's part of the sum of all replicas' tensors."""
        self._say_devices()
        channel = _SCATTERS + call
        # NCCL would add up in the dtype that travels.
        if self._size == 2 and flat.dtype.size < dtype.size:
            return tensorflow_xla.exchanged_sum(flat, dtype, rank(), channel)
        flat = tf.cast(flat, dtype)
        return tensorflow_xla.reduce_scatter(flat, self._size, channel)

    def all_gather(
        self, parts: Sequence[tf.Tensor], call: int, after: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Joins parts. An entry of each `after` travels along."""
        self._say_devices()
        channel = _GATHERS + call
        return tensorflow_xla.all_gather(parts, self._size, channel, after)

    def _say_devices(self) -> None:
        # Only CollectiveReduceV2 says which devices the program is for, for
        # sums and products. So it sums an empty tensor, once in each graph.
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._told:
            self._told.add(graph)
            self._lowered(tf.zeros([0], tf.int32), SUM)

    def _reduced(self, tensor: tf.Tensor, index: int, op: Op) -> tf.Tensor:
        if not isinstance(op, Extreme):
            return self._lowered(tensor, op)
        if tensor.dtype == tf.int32:
            self._say_devices()
            reduce = tensorflow_xla.xla_all_reduce
            return reduce(tensor, self._size, op.merge_op)
        # That other op does not support int64. So all tensors are gathered by
        # a sum of blocks, of which each replica fills its own.
        with tensorflow_tracing.of_rank():
            blocks = [tf.zeros_like(tensor)] * self._size
            blocks[self._rank(index)] = tensor
            block = tf.stack(blocks)
        gathered = self._lowered(block, SUM)
        return functools.reduce(op.of_two, tf.unstack(gathered, num=self._size))

    def _lowered(self, tensor: tf.Tensor, op: Op) -> tf.Tensor:
        # Channels are numbered anew in each branch and function, and XLA lays
        # out all tensors of one number alike, so they have one rank.
        reduced = tf.raw_ops.CollectiveReduceV2(
            input=tf.reshape(tensor, [-1]),
            group_size=self._size,
            group_key=self._group_key,
            instance_key=1,
            ordering_token=[],
            merge_op=op.merge_op,
            final_op="Id",
            communication_hint="nccl",
        )
        return tf.reshape(reduced, tf.shape(tensor))


class SleepingThreads:
    """Threads that TensorFlow leaves asleep after programs with collectives.

    Each execution leaves one for each GPU, for 1,000 s (docs/notes/xla.md), and
    Linux aborts a process that asks for too many.
    """

    def __init__(self) -> None:
        self._executions = 0
        self._are_many = self._has_warned = False

    def are_many(self, name: str) -> bool:
        """Whether an execution should leave none; all processes ask alike."""
        if self._executions % CHECKED_EVERY == 0:
            used, limit = threads_and_limit()
            own = used > max(1000, 0.75 * limit)
            self._are_many = any(all_gather_json(f"threads of {name}", own))
            if self._are_many and not self._has_warned:
                self._has_warned = True
                warn(
                    f"{name}: this process has {used:,} threads, and Linux "
                    f"aborts it at {limit:,.0f}. After each execution by XLA "
                    "TensorFlow leaves a thread asleep for 1,000 s for each "
                    "GPU (tensorflow/tensorflow#62466). Until some have ended, "
                    "steps run without XLA, which is slower. Long executions "
                    "leave few: `model.compile(steps_per_execution=32)` makes "
                    "them so where a callback looks at each batch, and a call "
                    "of `withdevices` may take several steps. Or raise the "
                    "limit: `kernel.pid_max`, `vm.max_map_count`, `ulimit -u`."
                )
        self._executions += 1
        return self._are_many


def threads_and_limit() -> tuple[int, float]:
    """Returns how many threads this process has, and may have."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    own = int(fields[17])
    of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    group = Path("/sys/fs/cgroup")
    limits = (
        _number(Path("/proc/sys/vm/max_map_count")) / 2,  # a stack has two
        _number(Path("/proc/sys/kernel/pid_max")),
        _number(Path("/proc/sys/kernel/threads-max")),
        math.inf if of_user == resource.RLIM_INFINITY else of_user,
        _number(group / "pids.max") - _number(group / "pids.current", 0) + own,
    )
    return own, min(limits)


def _number(file: Path, otherwise: float = math.inf) -> float:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is no such limit
        return otherwise
