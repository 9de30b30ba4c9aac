"""Times `allreduce` in a process of its own and prints JSON lines.

python -m examples.benchmarks.collectives DEVICES [options]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

import keras_conflux as kc
from examples.benchmarks import all_reduce_time

FORMS = {"flat": (1, (10, 40)), "list of 160": (160, (2, 10))}
"""By name, how many tensors, and how many reductions the two calls have."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        "python -m examples.benchmarks.collectives"
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
                    seconds, call = all_reduce_time.seconds_each(
                        op, copies, devices, jit_compile, times, options.repeats
                    )
                    middle = statistics.median(seconds)
                    moved = all_reduce_time.bytes_moved(
                        4 * length * count, len(devices)
                    )
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


def _values(op: str, length: int) -> tf.Tensor:
    """Returns what stays finite however often it is reduced, and is not 0."""
    drawn = np.random.default_rng(0).standard_normal(length, np.float32)
    if op == "product":
        drawn = np.sign(drawn)
    return tf.constant(drawn * 1e-30 if op == "sum" else drawn)


def main() -> None:
    """Prints one line of JSON a result."""
    for result in measure(parse(sys.argv[1:])):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
