"""All-reduces one tensor among the devices of a strategy.

Each replica calls `all_reduce` for itself while its program is traced; the
calls of all replicas, matched by their order, are one collective. Everything
that replicas exchange goes through here.
"""

import collections
import contextlib
import functools
import itertools
import threading
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.contexts import Setting
from keras_conflux._common.contexts import having
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.errors import StrategyError
from keras_conflux._common.trees import length
from keras_conflux._common.user_warnings import warn
from keras_conflux._communication import dtypes
from keras_conflux._communication.transports.in_graph import CpuRing
from keras_conflux._communication.transports.in_graph import Nccl
from keras_conflux._communication.transports.in_graph import (
    NcclBetweenProcesses,
)
from keras_conflux._communication.transports.in_graph import Transport
from keras_conflux._communication.transports.in_graph import all_reduce_eagerly
from keras_conflux._communication.transports.in_graph import in_shape_of
from keras_conflux._communication.transports.ops import SUM
from keras_conflux._communication.transports.ops import Extreme
from keras_conflux._communication.transports.ops import Op
from keras_conflux._communication.transports.xla import SleepingThreads
from keras_conflux._communication.transports.xla import XlaNccl
from keras_conflux._compat import replicas_in_turn
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import compute_capability
from keras_conflux._graphs.effects import waits

# Far from the keys that TensorFlow's own strategies count up from 1.
_FIRST_GROUP_KEY = 1 << 20
_made: collections.Counter[tuple[str, ...]] = collections.Counter()
_trace_keys = itertools.count()


class Trace:
    """The collective calls that replicas make while they are traced."""

    def __init__(self, size: int) -> None:
        self.key = next(_trace_keys)
        """The number that identifies this trace."""
        self.calls = [0] * size
        """The number of calls of each replica."""
        self.compared = [0] * size
        """The number of its calls that were compared with replica 0's."""
        self.signatures: list[Any] = []
        """The descriptions of the calls of replica 0."""
        self.collectives = 0
        """The number of calls in the traces inside this one."""
        eager = tf.executing_eagerly()
        self.graph: Any = None if eager else tf.compat.v1.get_default_graph()
        self.is_in_turn = False
        """Whether replicas run eagerly, one after another."""
        self.lock: Any = None
        """The lock of an execution in which replicas on CPU devices meet."""
        self.levelled: dict[CpuRing, Any] = {}
        """The operations that level a ring's counters under the lock."""


_trace: Setting[Trace | None] = Setting(None)


def _new_group_key(devices: tuple[Device, ...]) -> int:
    """Returns a key that is equal in all processes, and of this group only."""
    _made[devices] += 1
    text = f"{devices} {_made[devices]}"
    return _FIRST_GROUP_KEY + 2 * (zlib.crc32(text.encode()) % (1 << 28))


def _least(capabilities: Any) -> tuple[int, ...] | None:
    """Returns the lowest compute capability, if all devices have one."""
    found = [*capabilities]
    return min(map(tuple, found)) if all(found) else None


class OneReplica:
    """The channel of a replica that is alone, as where a step runs once."""

    size = 1
    on_gpu = False
    joins_buckets = False

    def rank_as_constant(self, index: int) -> int:
        """Returns the position of the replica."""
        return index

    def all_reduce(self, tensor: tf.Tensor, *_: Any) -> tf.Tensor:
        """Returns the replica's tensor."""
        return tf.identity(tensor)

    def assert_same_call(self, *_: Any) -> None:
        """Does nothing: there is no other call."""


class Communicator:
    """The collective channel of one tuple of devices.

    It chooses the transport, and compares the calls of the replicas while they
    are traced. Its methods are given the index of the calling replica, and
    whether the graph becomes part of an XLA program. A rank may be a tensor, so
    a function returns it where somebody needs it.
    """

    joins_buckets = True
    """Whether many small tensors are better moved as a few large ones."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.on_gpu = self.devices[0].kind == "GPU"
        what = f"a strategy over {', '.join(self.devices)}"
        own = _least(map(compute_capability, self.devices))
        self.compute_capability = _least(all_gather_json(what, own))
        """The lowest of all devices, as `(9, 0)`, if all are CUDA GPUs."""
        if self.on_gpu and self.spans_processes and self.size > 2:
            warn(
                "GPUs of several processes: few programs have been compared "
                "with one device so far, see docs/guarantees.md. Compare a "
                "short training with one process."
            )
        self._latest = Trace(len(self.devices))
        self._lock = threading.RLock()
        self._running: Any = None
        self._threads = SleepingThreads()
        self._group_key = _new_group_key(self.devices)
        with tf.init_scope():
            self._in_xla = XlaNccl(
                self.devices,
                self.rank_as_constant,
                self.size,
                self._group_key,
                in_order=self.on_gpu and self.spans_processes,
            )
            self._rings = [
                CpuRing(self.devices, self.size, self._group_key, lane)
                for lane in (0, 1)
                if not self.on_gpu
            ]
            self._in_graph = self._rings[0] if self._rings else self._nccl()
            in_graphs = not tf.config.functions_run_eagerly()
            if self.size > 1 and not self.on_gpu and in_graphs:
                self._warm_up()

    @property
    def size(self) -> int:
        """The number of replicas of all processes."""
        return len(self.devices) * process_count()

    @property
    def spans_processes(self) -> bool:
        """Whether some of the replicas are in other processes."""
        return process_count() > 1

    def rank(self, index: int) -> int:
        """Returns the position of a replica of this process among all."""
        return process_index() * len(self.devices) + index

    def rank_as_constant(self, index: int) -> int:
        """Returns `rank`, and marks the trace as one of that replica alone."""
        replicas_in_turn.mark_replica_specific()
        tensorflow_tracing.note_rank()
        return self.rank(index)

    def repeat_calls(self, index: int) -> None:
        """Counts for a replica the calls of replica 0, whose trace it runs."""
        trace = self._present_trace()
        trace.calls[index] = trace.calls[0]

    @property
    def supports_xla(self) -> bool:
        """Whether XLA programs can use it: not on several CPU devices."""
        return self.size == 1 or self.on_gpu

    @property
    def may_reorder(self) -> bool:
        """Whether XLA may order, and leave out, what it is given now."""
        return self.size > 1 and not self._in_xla.in_order

    def in_order(self, needs: bool) -> contextlib.AbstractContextManager[None]:
        """Keeps the order of tracing, as programs that differ need it."""
        return having(self._in_xla, in_order=needs or self._in_xla.in_order)

    def spares_threads(self, name: str) -> bool:
        """Whether the next execution of `name` should be none by XLA."""
        return self.on_gpu and self.size > 1 and self._threads.are_many(name)

    def all_reduce(
        self, tensor: tf.Tensor, index: int, op: Op, in_xla: bool = False
    ) -> tf.Tensor:
        """Returns the reduction of every replica's `tensor`.

        It is dense and of a shape and dtype that all replicas share: bfloat16,
        half, float32, float64, int32 or int64. The op is any but `MEAN`.
        """
        if self.size == 1 or tensor.shape.num_elements() == 0:
            return tf.identity(tensor)
        if tf.executing_eagerly():
            if self.spans_processes:
                traced = "call `strategy.run` in a `tf.function`"
                if tf.config.functions_run_eagerly():
                    traced = "leave out `tf.config.run_functions_eagerly(True)`"
                raise NotImplementedError(
                    "Replicas that run eagerly exchange nothing between "
                    f"processes. Debug in one process, or {traced}."
                )
            return all_reduce_eagerly(tensor, op, self.devices[0])
        if self.on_gpu and isinstance(op, Extreme) and tensor.dtype.is_floating:
            integers = dtypes.to_ordered_integers(tensor, op)
            reduced = self.all_reduce(integers, index, op, in_xla)
            return dtypes.to_floats(reduced, tensor.dtype)
        if in_xla:
            call = self._next_call(index)
            return self._in_xla.all_reduce(tensor, index, op, call)
        return self._graph_reduce(tensor, index, op)

    def reduce_scatter(
        self,
        flat: tf.Tensor,
        dtype: tf.DType,
        index: int,
        rank: Callable[[], Any],
        in_xla: bool = False,
    ) -> tf.Tensor:
        """Returns the replica's part of the sum of tensors of one axis.

        The number of replicas divides it. The sums have the dtype.
        """
        if in_xla and self.size > 1 and self._in_xla.moves_parts:
            channel = self._next_channel(index)
            return self._in_xla.reduce_scatter(flat, dtype, rank, channel)
        total = self.all_reduce(tf.cast(flat, dtype), index, SUM, in_xla)
        size = length(flat) // self.size
        return tf.slice(total, [rank() * size], [size])

    def all_gather(
        self,
        parts: Sequence[tf.Tensor],
        index: int,
        rank: Callable[[], Any],
        in_xla: bool = False,
        after: Sequence[tf.Tensor] = (),
        again: bool = False,
    ) -> list[tf.Tensor]:
        """Returns the parts of all replicas, joined in the order of ranks.

        They are of one axis, whose size all replicas share. The floats `after`
        have to be known before, where XLA orders. With `again`, it runs earlier
        than it is traced: see `can_gather_again`.
        """
        if in_xla and self.size > 1 and self._in_xla.moves_parts:
            channel = self._next_channel(index)
            return self._in_xla.all_gather(parts, channel, after)
        here = tf.cast(rank(), tf.int32)  # XLA's is of 64 bits
        is_here = tf.expand_dims(tf.equal(tf.range(self.size), here), -1)

        def joined(part: tf.Tensor) -> tf.Tensor:
            zero = SUM.neutral(part.dtype)
            blocks = tf.where(is_here, tf.expand_dims(part, 0), zero)
            flat = tf.reshape(blocks, [self.size * length(part)])
            if again:
                call, early = self._next_call(index), self._rings[1]
                with tf.control_dependencies(self._lock_execution(early)):
                    return early.all_reduce(flat, index, SUM, call)
            return self.all_reduce(flat, index, SUM, in_xla)

        return [joined(part) for part in parts]

    def can_gather_again(self, in_xla: bool) -> bool:
        """Whether collectives need not run in the order of tracing."""
        if self.size == 1 or tf.executing_eagerly():
            return False
        return self._in_xla.moves_parts if in_xla else not self.on_gpu

    def _next_channel(self, index: int) -> int:
        self._next_call(index)
        return self._present_trace().calls[index]

    def assert_same_call(
        self, index: int, signature: Any, check: Callable[[Any, Any, int], None]
    ) -> None:
        """Has `check` compare the next collective with replica 0's.

        That one is traced first.
        """
        trace = self._present_trace()
        position = trace.compared[index]
        trace.compared[index] += 1
        if index == 0:
            trace.signatures.append(signature)
        elif position < len(trace.signatures):
            check(trace.signatures[position], signature, index)

    def called(self, index: int) -> tuple[int, int]:
        """Returns how many calls a replica has made and compared so far."""
        trace = self._present_trace()
        return trace.calls[index], trace.compared[index]

    def forget_since(self, index: int, before: tuple[int, int]) -> None:
        """Forgets a replica's calls in a trace that is made again."""
        trace = self._present_trace()
        trace.calls[index], trace.compared[index] = before
        if index == 0:
            del trace.signatures[before[1] :]

    def trace_replicas(self, run: Callable[[], Any], is_traced: bool) -> Any:
        """Calls `run`, which traces all replicas, and compares their calls."""
        with self.tracing() as trace, self._alone(trace, is_traced):
            trace.is_in_turn = trace.graph is None and not is_traced
            result = run()
            calls = trace.calls
            if len(set(calls)) > 1:
                few, many = calls.index(min(calls)), calls.index(max(calls))
                raise ReplicaMismatchError(
                    f"Replica {many} makes {calls[many] - calls[few]} more "
                    f"collective call(s) than replica {few} and would wait "
                    "for it forever. Call `allreduce` and its kin on every "
                    "replica, in the same order, not under "
                    "`if replica().index == ...`. If a `tf.function` that the "
                    "step calls makes variables, build the model before: "
                    "TensorFlow traces such a function twice."
                )
            return result

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Counts the calls of the replicas that are traced here."""
        outer, trace = _trace.get(), Trace(len(self.devices))
        try:
            with _trace.to(trace), having(self, _latest=trace):
                yield trace
        finally:
            trace.collectives += max(trace.calls)
            if outer is not None:
                outer.collectives += trace.collectives

    @contextlib.contextmanager
    def _alone(self, trace: Trace, is_traced: bool) -> Iterator[None]:
        """Keeps executions of a trace apart from others, as of other threads.

        They would meet in one collective. A traced function tells of none.
        """
        before = len(trace.graph.get_operations()) if trace.graph else 0
        try:
            if is_traced:
                self._lock_execution(*self._rings)
            yield
            if trace.graph is not None and trace.lock is not None:
                made = trace.graph.get_operations()[before:]
                with tf.control_dependencies(filter(waits, made)):
                    tf.raw_ops.ConsumeMutexLock(mutex_lock=trace.lock)
        finally:
            trace.lock = None  # an eager one ends with its tensor

    def _lock_execution(self, *rings: CpuRing) -> list[Any]:
        """Returns what these rings' collectives wait for: lock and keys."""
        trace = self._present_trace()
        new = [each for each in rings if each not in trace.levelled]
        if self.spans_processes or not new:
            return [*filter(None, map(trace.levelled.get, rings))]
        with (
            trace.graph.as_default() if trace.graph else tf.init_scope(),
            tensorflow_tracing.of_rank(),
            tf.control_dependencies(None),
            tf.device("CPU:0"),
        ):
            if trace.lock is None:
                trace.lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([trace.lock]):
                trace.levelled.update((each, each.level()) for each in new)
        return self._lock_execution(*rings)

    @functools.cached_property
    def _mutex(self) -> tf.Tensor:
        with tf.init_scope(), tf.device("CPU:0"):
            made = tf.raw_ops.MutexV2(shared_name=f"conflux_{self._group_key}")
        tensorflow_internals.note_own(made, self)
        return made

    @contextlib.contextmanager
    def exclusive(self, program: Any, name: str) -> Iterator[None]:
        """Keeps programs with collectives apart, or raises if they wait."""
        if not self._lock.acquire(blocking=False):
            running = self._running
            if tensorflow_tracing.in_python_op_of(running):
                raise StrategyError(
                    f"{name!r} exchanges tensors between "
                    f"{', '.join(self.devices)}, and was called in a "
                    "`tf.py_function` or `tf.numpy_function` of a step that "
                    "runs on them and waits for it. Call it between steps, "
                    "as in a callback, or replicate its model on other "
                    "devices. A model's `predict` exchanges nothing and may "
                    "be called there."
                )
            self._lock.acquire()
        try:
            with having(self, _running=program):
                yield
        finally:
            self._lock.release()

    def _nccl(self) -> Transport:
        if self.spans_processes:
            # XLA's programs have the NCCL communicator of the other key.
            key = self._group_key + 1
            return NcclBetweenProcesses(self.devices, self.size, key)
        return Nccl(self.size, self._group_key)

    def _present_trace(self) -> Trace:
        # Threads of TensorFlow have no context variables of ours.
        return _trace.get() or self._latest

    def _next_call(self, index: int) -> str:
        """Returns a key that the call shares with other replicas' calls."""
        trace = self._present_trace()
        trace.calls[index] += 1
        return f"{trace.key}_{trace.calls[index]}"

    def _warm_up(self) -> None:
        """Runs a first collective, in a step that cannot fail.

        TensorFlow cannot repair a group whose first collective is cancelled.
        """

        @tf.function(autograph=False)
        def all_devices() -> None:
            for index, device in enumerate(self.devices):
                call = self._next_call(index)
                with tf.device(device):
                    self._in_graph.all_reduce(tf.zeros(()), index, SUM, call)

        with (
            errors_reported_to_all("a strategy's first collective"),
            self.tracing(),
        ):
            all_devices()

    def _graph_reduce(self, tensor: tf.Tensor, index: int, op: Op) -> tf.Tensor:
        if tensorflow_tracing.in_replica_loop():
            raise NotImplementedError(
                "A collective inside a `tf.while_loop`, `tf.map_fn` or "
                "`tf.vectorized_map` (or a Python loop over tensors) of the "
                "replica's program would wait forever: TensorFlow does not "
                "match the loops of different replicas. Put the loop around "
                "the step, or reduce after the loop. `tape.jacobian` is one, "
                "too: write `tape.gradient` of each entry of the target."
            )
        if self._present_trace().is_in_turn:
            raise NotImplementedError(
                "A collective in a `tf.function` that a replica calls while it "
                "runs eagerly would wait forever: TensorFlow runs such "
                "replicas one after another. Put `strategy.run` in a "
                "`tf.function`, or give it this one."
            )
        # It runs on the device of this replica.
        replicas_in_turn.mark_replica_specific()
        call = self._next_call(index)
        locks = self._lock_execution(*self._rings[:1])
        with tf.device(self.devices[index]), tf.control_dependencies(locks):
            if tensor.shape.is_fully_defined():
                return self._in_graph.all_reduce(tensor, index, op, call)
            # It may turn out empty, on which TensorFlow 2.21's ring sometimes
            # ends the process; so one element goes along.
            flat = tf.reshape(tensor, [-1])
            padded = tf.concat([flat, tf.zeros([1], tensor.dtype)], 0)
            reduced = self._in_graph.all_reduce(padded, index, op, call)[:-1]
            return in_shape_of(tensor, reduced)
