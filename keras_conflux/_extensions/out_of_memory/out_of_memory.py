"""Goes on after a batch for which a device has no memory."""

import functools
import re
from collections.abc import Callable
from typing import Any
from typing import Protocol
from typing import overload

import tensorflow as tf

from keras_conflux._common import arguments
from keras_conflux._common import trees
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._custom_loops.given import P
from keras_conflux._custom_loops.given import PerDeviceCall
from keras_conflux._custom_loops.given import R
from keras_conflux._custom_loops.given import R_co
from keras_conflux._custom_loops.spmd import withdevices
from keras_conflux._devices.device import DevicesLike
from keras_conflux._replication.replicas import Replicas


class SkippingFunction(PerDeviceCall[P, R_co], Protocol[P, R_co]):
    """A function of parameters `P` that runs on every device, or is skipped."""

    skipped: int
    """How many calls were skipped, and returned `None`."""


class SkippingDecorator(Protocol):
    """The result of `skip_out_of_memory` if it is given options only."""

    def __call__(
        self, fn: Callable[P, R], /
    ) -> SkippingFunction[P, Replicas[R] | None]: ...


@overload
def skip_out_of_memory(
    fn: Callable[P, R],
    *,
    devices: DevicesLike = None,
    jit_compile: bool = False,
) -> SkippingFunction[P, Replicas[R] | None]: ...
@overload
def skip_out_of_memory(
    fn: None = None, *, devices: DevicesLike = None, jit_compile: bool = False
) -> SkippingDecorator: ...
def skip_out_of_memory(
    fn: Callable[..., Any] | None = None,
    *,
    devices: DevicesLike = None,
    jit_compile: bool = False,
) -> Any:
    """Makes `fn` run on every device, and skips batches without memory.

    Like `withdevices`, but where a device runs out of memory the call warns,
    naming the batch, and returns `None` instead of raising, as for data of
    varying size with a rare batch that is too large. So does FluxDistributed.

    `fn` makes no collective call. A replica without memory would not make it,
    and on GPUs the others would wait without end, as an NCCL call cannot be
    taken back. So compute gradients in `fn`, then reduce and apply them in a
    `withdevices` function, which a batch without memory never reaches. That
    gives up the overlap of the reduction with the backward pass.

    TensorFlow 2.21 waits ten seconds for memory before it gives up, at each
    skip. Another error of a library is raised.

    Writes of some replicas' layers stay: the seeds of a Dropout, averages of a
    BatchNormalization. After a skip, `synchronize(model)` makes copies equal.

    Args:
        fn: The function to run. `None` makes a decorator with options.
        devices: See `keras_conflux.devices`. Default: the devices of the
            `Replicas` among the arguments, as with `withdevices`.
        jit_compile: Whether XLA compiles each program, as with `withdevices`.

    Returns:
        A function of the same parameters that returns a `Replicas` or `None`.
        Its attribute `skipped` says how often it was `None`.

    Raises:
        ValueError: When it is called, if `fn` makes a collective call on
            several devices.
        Exception: When it is called, all that a `withdevices` function raises,
            `tf.errors.ResourceExhaustedError` apart.

    Example:
        ```python
        @kc.skip_out_of_memory
        def squares(x):
            return tf.reduce_sum(x**2)

        for inputs, _ in kc.distribute(dataset):
            sums = squares(inputs)
            if sums is not None:
                total = kc.allreduce("sum", sums)
        print(squares.skipped)
        ```
    """
    if fn is None:
        return functools.partial(
            skip_out_of_memory, devices=devices, jit_compile=jit_compile
        )
    arguments.assert_is(fn, Callable, "a function that is run on every device")
    return _Skipping(fn, devices, jit_compile)


class _Skipping:
    def __init__(
        self, fn: Callable[..., Any], devices: DevicesLike, jit_compile: bool
    ) -> None:
        self.skipped = 0
        """The number of batches for which there was no memory."""
        self._name = fn.__qualname__
        alone = _without_collectives(fn)
        self._run = withdevices(alone, devices=devices, jit_compile=jit_compile)

    def __call__(self, *args: Any, **kwargs: Any) -> Replicas[Any] | None:
        try:
            return self._run(*args, **kwargs)
        except tf.errors.ResourceExhaustedError as error:
            self.skipped += 1
            warn(
                f"{self._name}: no memory for a batch of "
                f"{_describe((args, kwargs))} per device. It is skipped, as "
                f"{self.skipped} so far. {_reason(error)} Call "
                "`keras_conflux.synchronize` on models whose layers keep "
                "something of their data."
            )
            return None


def _without_collectives(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `fn` raise while it is traced if it makes a collective call."""

    # Graph code like `fn`, as AutoGraph goes from one to the other.
    def one_replica(*args: Any, **kwargs: Any) -> Any:
        before = _calls()
        result = fn(*args, **kwargs)
        if _calls() > before:
            _refuse(fn.__qualname__)
        return result

    one_replica.__qualname__ = fn.__qualname__
    return one_replica


@tf.autograph.experimental.do_not_convert
def _calls() -> int:
    return tf.distribute.get_strategy().communicator.called(replica_index())[0]


@tf.autograph.experimental.do_not_convert
def _refuse(name: str) -> None:
    raise ValueError(
        f"{name} makes a collective call, such as `allreduce`. If a replica "
        "had no memory, the others would wait there forever. Return the "
        "values, and reduce them in a `withdevices` function."
    )


def _describe(arguments: trees.Tree) -> str:
    parts = trees.flatten(arguments)
    parts = [part[0] if isinstance(part, Replicas) else part for part in parts]
    return ", ".join(
        trees.describe(leaf)
        for leaf in trees.present(parts)
        if hasattr(leaf, "shape")
    )


def _reason(error: Exception) -> str:
    """Returns TensorFlow's words on the tensor, and the replica."""
    said = re.search(r"(OOM|Out of memory)[^\n]*", str(error))
    reason = said[0].rstrip(".") if said else str(error).splitlines()[-1]
    notes = getattr(error, "__notes__", [])
    where = [note for note in notes if note.startswith("Raised in replica")]
    return " ".join([f"{reason}.", *where])
