"""All-reduces one tensor among the devices of a strategy.

Each replica calls `all_reduce` for itself while its program is traced; the
calls of all replicas, matched by their order, are one collective. Everything
that replicas exchange goes through here.
"""

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._communication import float_order
from keras_conflux._compat import tensorflow_internals
from keras_conflux._devices.device import Device

# Names in TensorFlow's CPU collectives and in its NCCL op.
_MERGE_OPS = {"sum": "Add", "product": "Mul", "min": "Min", "max": "Max"}
_NCCL_OPS = {"sum": "sum", "product": "prod", "min": "min", "max": "max"}

_EAGER_OPS = {
    "sum": operator.add,
    "product": operator.mul,
    "min": tf.minimum,
    "max": tf.maximum,
}

# Far from the keys that TensorFlow's own strategies count up from 1.
_group_keys = itertools.count(1 << 20)


class Communicator:
    """The collective channel of one tuple of devices.

    TensorFlow tells collectives apart by keys. On CPU devices the key comes
    from a counter variable on each device, drawn when the op runs: so shapes
    may change from call to call, an op may sit in a branch of `tf.cond`, and
    a failed step leaves no key behind that a later one could meet. On GPUs
    the raw NCCL op is told apart by its name and the step it runs in.

    Args:
        devices: One device a replica, all of one kind, in replica order.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.on_gpu = self.devices[0].kind == "GPU"
        self._group_key = next(_group_keys)
        self._calls = [0] * len(self.devices)
        self._compared = [0] * len(self.devices)
        self._signatures: list[Any] = []
        self._local = threading.local()
        self.lock = threading.RLock()
        """Held while replicas are traced or run: two programs at once would
        meet each other's collectives."""
        with tf.init_scope():
            self._keys = [self._make_key(device) for device in self.devices]
            eager = tf.config.functions_run_eagerly()
            if self.size > 1 and not self.on_gpu and not eager:
                self._meet()

    @property
    def size(self) -> int:
        """How many replicas take part."""
        return len(self.devices)

    @property
    def takes_xla(self) -> bool:
        """Whether XLA programs can use it: not on several CPU devices."""
        return self.size == 1 or self.on_gpu

    def all_reduce(self, tensor: tf.Tensor, index: int, op: str) -> tf.Tensor:
        """Returns the reduction of every replica's `tensor`.

        Args:
            tensor: Dense, of a shape and dtype that all replicas share.
                bfloat16, half, float32, float64, int32 or int64.
            index: The calling replica.
            op: `"sum"`, `"product"`, `"min"` or `"max"`.
        """
        if self.size == 1 or tensor.shape.num_elements() == 0:
            return tf.identity(tensor)
        if tf.executing_eagerly():
            return self._eager_all_reduce(tensor, op)
        is_extreme = op in ("min", "max")
        if self.on_gpu and is_extreme and tensor.dtype.is_floating:
            integers = float_order.to_integers(tensor, op)
            reduced = self.all_reduce(integers, index, op)
            return float_order.to_floats(reduced, tensor.dtype)
        if self.is_inside_xla:
            self._calls[index] += 1
            return self._xla(tensor, index, op)
        return self._traced_all_reduce(tensor, index, op)

    @contextlib.contextmanager
    def inside_xla(self) -> Iterator[None]:
        """Says that what this thread traces becomes part of an XLA program."""
        before = self.is_inside_xla
        self._local.inside_xla = True
        try:
            yield
        finally:
            self._local.inside_xla = before

    @property
    def is_inside_xla(self) -> bool:
        """Whether what this thread traces becomes part of an XLA program."""
        traced = not tf.executing_eagerly()
        return traced and getattr(self._local, "inside_xla", False)

    def calls(self, index: int) -> int:
        """Returns how many calls of a replica have been traced so far."""
        return self._calls[index]

    def assert_same_call(
        self, index: int, signature: Any, check: Callable[[Any, Any, int], None]
    ) -> None:
        """Compares what this replica is about to reduce with replica 0's.

        Args:
            index: The calling replica. Replicas are traced one after another,
                replica 0 first.
            signature: What describes the call.
            check: Called with replica 0's signature, this one and the index;
                raises if they differ.
        """
        position = self._compared[index]
        self._compared[index] += 1
        if index == 0:
            self._signatures.append(signature)
        elif position < len(self._signatures):
            check(self._signatures[position], signature, index)

    def watch(self, run: Callable[[], Any]) -> Any:
        """Calls `run`, which traces all replicas, and checks their calls.

        Raises:
            ReplicaMismatchError: If replicas made different numbers of calls.
        """
        calls = self._calls
        try:
            result = run()
            if len(set(calls)) > 1:
                few, many = calls.index(min(calls)), calls.index(max(calls))
                raise ReplicaMismatchError(
                    f"Replica {many} makes {calls[many] - calls[few]} more "
                    f"collective call(s) than replica {few} and would wait "
                    "for it for ever. Call `allreduce` and its kin on every "
                    "replica, in the same order, not under "
                    "`if replica().index == ...`. If a `tf.function` that the "
                    "step calls makes variables, build the model before: "
                    "TensorFlow traces such a function twice."
                )
            return result
        finally:
            self._level()

    def recover(self) -> None:
        """Makes the channel usable after a step that failed half-way."""
        self._level()
        if not self.on_gpu:
            latest = max(int(key.numpy()) for key in self._keys)
            for key in self._keys:
                key.assign(latest + 1)

    def _level(self) -> None:
        self._calls[:] = [max(self._calls)] * self.size
        self._compared[:] = [0] * self.size
        self._signatures.clear()

    def _meet(self) -> None:
        """Makes the devices known to each other, in a step that cannot fail.

        TensorFlow cannot repair a group whose first collective is cancelled.
        """

        @tf.function
        def all_devices() -> None:
            for index, _ in enumerate(self.devices):
                self.all_reduce(tf.zeros(()), index, "sum")

        all_devices()
        self._level()

    def _make_key(self, device: Device) -> tf.Variable:
        with tf.device("CPU:0" if self.on_gpu else device):
            return tf.Variable(tf.constant(0), trainable=False)

    def _traced_all_reduce(
        self, tensor: tf.Tensor, index: int, op: str
    ) -> tf.Tensor:
        if tensorflow_internals.in_replica_loop():
            raise NotImplementedError(
                "A collective inside a `tf.while_loop` (or a Python loop over "
                "tensors) of the replica's program would wait for ever: "
                "TensorFlow does not match the loops of different replicas. "
                "Put the loop around the step, or reduce after the loop."
            )
        self._calls[index] += 1
        reduce = self._nccl if self.on_gpu else self._cpu
        with tf.device(self.devices[index]):
            if tensor.shape.is_fully_defined():
                return reduce(tensor, index, op)
            # It may turn out empty, on which TensorFlow 2.21's ring sometimes
            # ends the process; so one element goes along.
            flat = tf.reshape(tensor, [-1])
            padded = tf.concat([flat, tf.zeros([1], tensor.dtype)], 0)
            reduced = reduce(padded, index, op)[:-1]
            return tf.ensure_shape(
                tf.reshape(reduced, tf.shape(tensor)), tensor.shape
            )

    def _cpu(self, tensor: tf.Tensor, index: int, op: str) -> tf.Tensor:
        counter = self._keys[index]
        with tf.control_dependencies([tensor]):
            key = counter.assign_add(1, read_value=True)
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self.size,
            group_key=self._group_key,
            instance_key=tf.convert_to_tensor(key),
            # A resource of the replica's own: without one TensorFlow runs the
            # collectives of a function one after another, replica by replica.
            ordering_token=[counter.handle],
            merge_op=_MERGE_OPS[op],
            final_op="Id",
            communication_hint="ring",
        )

    def _nccl(self, tensor: tf.Tensor, index: int, op: str) -> tf.Tensor:
        dtype = tensor.dtype
        if dtype == tf.bfloat16:  # the raw op has no kernel for it
            tensor = tf.cast(tensor, tf.float32)
        reduced = tf.raw_ops.NcclAllReduce(
            input=tensor,
            reduction=_NCCL_OPS[op],
            num_devices=self.size,
            shared_name=f"conflux_{self._group_key}_{self._calls[index]}",
        )
        tensorflow_internals.must_run(reduced)
        return tf.cast(reduced, dtype)

    def _xla(self, tensor: tf.Tensor, index: int, op: str) -> tf.Tensor:
        if op in ("sum", "product"):
            return self._lowered(tensor, op)
        if tensor.dtype == tf.int32:
            # Only CollectiveReduceV2 says which devices the program is for,
            # and it knows sums and products alone. So it sums up nothing.
            self._lowered(tf.zeros([0], tensor.dtype), "sum")
            return tensorflow_internals.xla_all_reduce(
                tensor, self.size, _MERGE_OPS[op]
            )
        # That other op does not know int64. So all tensors are gathered by a
        # sum of blocks, of which each replica fills its own.
        blocks = [tf.zeros_like(tensor)] * self.size
        blocks[index] = tensor
        gathered = self._lowered(tf.stack(blocks), "sum")
        reduce = tf.reduce_min if op == "min" else tf.reduce_max
        return reduce(gathered, axis=0)

    def _lowered(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        # XLA matches collectives by their order in the programs of the group.
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self.size,
            group_key=self._group_key,
            instance_key=1,
            ordering_token=[],
            merge_op=_MERGE_OPS[op],
            final_op="Id",
            communication_hint="nccl",
        )

    def _eager_all_reduce(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        # Eagerly, replicas run one after another, so all must pause here, and
        # there is nothing to gain from a collective.
        def reduce_all(strategy: tf.distribute.Strategy, values: Any) -> Any:
            tensors = strategy.experimental_local_results(values)
            with tf.device(self.devices[0]):
                reduced = functools.reduce(_EAGER_OPS[op], tensors)
            return strategy.experimental_distribute_values_from_function(
                lambda _: reduced
            )

        context = tf.distribute.get_replica_context()
        return context.merge_call(reduce_all, args=(tensor,))
