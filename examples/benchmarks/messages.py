r"""Measures what several processes say to each other outside of steps.

    keras-conflux run --processes 8 --gpus-per-process 0 \\
        -m examples.benchmarks.messages

The first process prints one line of JSON: how long the processes take to join,
one message in which all say what they are about to do, the sum of one number
over one replica of each process, as for a metric, and a step of a small model
that is an execution of its own. An argument says how often each is measured.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_conflux as kc
from keras_conflux._cluster.agreement import assert_same_place


def measure(repetitions: int = 200) -> dict[str, Any]:
    """Returns the number of processes, and times in milliseconds."""
    began = time.perf_counter()
    kc.initialize()
    joined = time.perf_counter() - began

    @kc.withdevices(devices=1)
    def total() -> tf.Tensor:
        return kc.allreduce("sum", tf.ones([]))

    def milliseconds(function: Callable[[], Any]) -> float:
        times = [_seconds_of(function) for _ in range(repetitions)]
        return round(1000 * statistics.median(times), 2)

    return {
        "processes": kc.process_count(),
        "join_ms": round(1000 * joined),
        "message_ms": milliseconds(lambda: assert_same_place("the place")),
        "sum_ms": milliseconds(total),
        "step_ms": _step(repetitions),
    }


def _seconds_of(function: Callable[[], Any]) -> float:
    """Returns how long a call takes, when all processes make it."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _step(repetitions: int) -> float:
    """Returns the median time of a step with 433 parameters."""
    x = np.ones([16 * repetitions, 16], "float32")
    times: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())

    model = keras.Sequential(
        [keras.Input([16]), keras.layers.Dense(24), keras.layers.Dense(1)]
    )
    kc.replicate(model, devices=1)
    model.compile("sgd", "mse", steps_per_execution=1, jit_compile=False)
    model.fit(x, x[:, :1], batch_size=16, callbacks=[Clock()], verbose=0)
    return round(1000 * float(np.median(np.diff(times))), 2)


if __name__ == "__main__":
    found = measure(*map(int, sys.argv[1:]))
    if kc.process_index() == 0:
        print(json.dumps(found), flush=True)
    kc.barrier()
