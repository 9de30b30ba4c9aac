"""Times `allreduce` in a process of its own and prints JSON lines.

    python -m keras_conflux.bench.collectives DEVICES [options]

Reductions are chained in one `withdevices` call, each of the former's result,
so they run one after another. Two such calls, of few and of many, tell what a
reduction takes and what the call does.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import keras_conflux as kc

FORMS = {"flat": (1, (10, 40)), "list of 160": (160, (2, 10))}
"""By name, how many tensors, and how many reductions the two calls have."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        "python -m keras_conflux.bench.collectives"
    )
    parser.add_argument("devices", type=int)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 65536])
    parser.add_argument("--ops", nargs="+", default=["sum", "mean", "max"])
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yields one result an op, size, form and way to compile."""
    devices = kc.devices(options.devices)
    compiled = [False, True] if devices[0].kind == "GPU" else [False]
    for kib in options.kib:
        for op in options.ops:
            for form, (count, times) in FORMS.items():
                length = max(1, kib * 256 // count)
                values = [_values(op, length) for _ in range(count)]
                copies = kc.replicate(values, devices)
                for jit_compile in compiled:
                    seconds, call = seconds_each(
                        op, copies, devices, jit_compile, times, options.repeats
                    )
                    middle = statistics.median(seconds)
                    moved = bytes_moved(4 * length * count, len(devices))
                    yield {
                        "devices": len(devices),
                        "kib": kib,
                        "op": op,
                        "form": form,
                        "jit": jit_compile,
                        "us": [round(s * 1e6, 1) for s in seconds],
                        "busbw_gb_s": round(moved / middle / 1e9, 2),
                        "call_us": round(call * 1e6, 1),
                    }


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


def _values(op: str, length: int) -> tf.Tensor:
    """Returns what stays finite however often it is reduced, and is not 0."""
    drawn = np.random.default_rng(0).standard_normal(length, np.float32)
    if op == "product":
        drawn = np.sign(drawn)
    return tf.constant(drawn * 1e-30 if op == "sum" else drawn)


def _chain(op: str, devices: Any, jit_compile: bool, times: int) -> Callable:
    def chain(tensors: list) -> list:
        for _ in range(times):
            tensors = kc.allreduce(op, tensors)
        return tensors

    return kc.withdevices(chain, devices=devices, jit_compile=jit_compile)


def _time(chain: Callable, copies: Any, repeats: int) -> list[float]:
    """Returns the seconds of each call but the first, which compiles."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        result = chain(copies)
        for each in result:
            tf.reshape(each[0], [-1])[:1].numpy()  # waits
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> None:
    """Prints one line of JSON a result."""
    for result in measure(parse(sys.argv[1:])):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
