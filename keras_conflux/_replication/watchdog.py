"""Ends the wait for a step that hangs, and says which replicas wait."""

import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._cluster.failures import wait_while_all_processes_live
from keras_conflux._common.errors import StepTimeoutError
from keras_conflux._common.trees import Tree
from keras_conflux._common.waiting import DaemonCall
from keras_conflux._common.waiting import step_timeout
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.tensorflow_internals import own_variable
from keras_conflux._devices.device import Device


class StepAbandoned(KeyboardInterrupt):
    """A second interrupt: the step still runs, and nobody waits for it."""


class StepWatchdog:
    """Calls a program of all replicas in a thread of its own.

    So an interrupt is heard while the devices work, and a collective that one
    replica never reaches does not keep the user waiting without an end. The
    time limit is multiplied by Keras' `steps_per_execution`.
    """

    def __init__(
        self, devices: Sequence[Device], name: str, steps: int = 1
    ) -> None:
        self._devices = devices
        self.name = name
        self._steps = steps
        with tf.init_scope():
            self._ended = [own_variable("CPU:0", np.int64(0)) for _ in devices]
        self._before: list[int] | None = None

    def mark_end(self, index: int, outputs: Tree) -> Tree:
        """Counts that a replica has ended when its outputs are there."""
        leaves = tf.nest.flatten(outputs, expand_composites=True)
        with tf.control_dependencies(filter(tf.is_tensor, leaves)):
            ended = self._ended[index].assign_add(1, read_value=False)
        with tf.control_dependencies([ended]):
            return tf.nest.map_structure(
                lambda x: tf.identity(x) if tf.is_tensor(x) else x,
                outputs,
                expand_composites=True,
            )

    def call(self, program: Callable[..., Any], *args: Any) -> Any:
        """Returns a program's result, unless it is late or interrupted."""
        seconds = self._steps * step_timeout()
        # Read only where a call has failed: reading takes half a millisecond.
        before, self._before = self._before or self.counts(), None
        run = keras_variables.with_this_threads_state(lambda: program(*args))
        call = DaemonCall(tensorflow_tracing.with_this_threads_summaries(run))
        try:
            ended = wait_while_all_processes_live(call, seconds)
        except KeyboardInterrupt:
            try:  # else replicas would be left half-way
                wait_while_all_processes_live(call, math.inf)
            except KeyboardInterrupt:
                raise StepAbandoned(
                    f"{self.name}: interrupted twice, while a call was running,"
                    f" which cannot be stopped. {self._who_waits(before)}"
                ) from None
            raise
        if not ended:
            call.abandon()
            raise StepTimeoutError(
                f"{self.name}: a call has not ended after {seconds:g} s. "
                f"{self._who_waits(before)} If your steps are that long, set "
                "the environment variable CONFLUX_STEP_TIMEOUT to more "
                "seconds per step."
            )
        result = call.result()
        self._before = [count + 1 for count in before]
        return result

    def counts(self) -> list[int]:
        """Returns how often each replica has ended."""
        return [int(count.numpy()) for count in self._ended]

    def _who_waits(self, before: list[int]) -> str:
        waiting = [
            f"{index} ({device})"
            for index, (device, now, then) in enumerate(
                zip(self._devices, self.counts(), before, strict=True)
            )
            if now == then
        ]
        return (
            f"Waiting: replica {', '.join(waiting)}. A replica that fails, as "
            "where its GPU alone is full, or stops before a collective leaves "
            "the others waiting in it: TensorFlow's log above may say why. End "
            "the process."
        )
