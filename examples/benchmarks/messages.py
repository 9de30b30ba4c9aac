r"""Measures what several processes say to each other outside of steps.

    keras-conflux run --processes 8 --gpus-per-process 0 \\
        -m examples.benchmarks.messages

The first process prints one line of JSON: how long the processes take to join,
one message in which all say what they are about to do, and the sum of one
number over one replica of each process, as for a metric.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import keras_conflux as kc
from keras_conflux._cluster.agreement import assert_same_place

_REPETITIONS = 200


def measure() -> dict[str, Any]:
    """Returns the number of processes, and times in milliseconds."""
    began = time.perf_counter()
    kc.initialize()
    joined = time.perf_counter() - began

    @kc.withdevices(devices=1)
    def total() -> tf.Tensor:
        return kc.allreduce("sum", tf.ones([]))

    return {
        "processes": kc.process_count(),
        "join_ms": round(1000 * joined),
        "message_ms": _milliseconds(
            lambda: assert_same_place("the same place")
        ),
        "sum_ms": _milliseconds(total),
    }


def _milliseconds(function: Callable[[], Any]) -> float:
    """Returns the median time of a call, when all processes make it."""
    times = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times), 2)


if __name__ == "__main__":
    found = measure()
    if kc.process_index() == 0:
        print(json.dumps(found), flush=True)
    kc.barrier()
