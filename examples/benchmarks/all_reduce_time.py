"""Times `allreduce`.

Reductions are chained in one `withdevices` call, each of the former's result,
so they run one after another. Two such calls, of few and of many, tell what a
reduction takes and what the call does.
"""

import statistics
import time
from typing import Any

import tensorflow as tf

import keras_conflux as kc


def seconds_each(
    op: str,
    copies: Any,
    devices: Any,
    jit_compile: bool,
    times: tuple[int, int],
    repeats: int,
) -> tuple[list[float], float]:
    """Times reductions in a row, without the call that they are in.

    Args:
        op: The reduction.
        copies: The tensors of each device, as `replicate` returns them.
        devices: The devices.
        jit_compile: Whether XLA compiles the call.
        times: How many reductions the shorter and the longer call have.
        repeats: How often each call is timed.

    Returns:
        The seconds that a reduction takes, once for each of the longer calls,
        and the seconds of a call itself.
    """
    few, many = times
    short, long = (
        _time(_chain(op, devices, jit_compile, count), copies, repeats)
        for count in times
    )
    fastest = min(short)
    seconds = [(t - fastest) / (many - few) for t in long]
    return seconds, fastest - few * statistics.median(seconds)


def bytes_moved(size: int, devices: int) -> float:
    """Returns what a ring of the devices moves over each connection."""
    return size * 2 * (1 - 1 / devices)


def _chain(op: Any, devices: Any, jit_compile: bool, times: int) -> Any:
    def chain(tensors: list[Any]) -> list[Any]:
        for _ in range(times):
            tensors = kc.allreduce(op, tensors)
        return tensors

    return kc.withdevices(chain, devices=devices, jit_compile=jit_compile)


def _time(chain: Any, copies: Any, repeats: int) -> list[float]:
    """Returns the seconds of each call but the first, which compiles."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        result = chain(copies)
        for each in result:
            tf.reshape(each[0], [-1])[:1].numpy()  # waits
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
