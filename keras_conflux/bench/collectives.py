"""Times `allreduce` in a process of its own and prints JSON lines.

    python -m keras_conflux.bench.collectives DEVICES [options]

Reductions are chained in one `withdevices` call, each of the former's result,
so what is timed is one after another, without the call itself.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import keras_conflux as kc

FORMS = {"flat": (1, 20), "list of 160": (160, 4)}
"""By name, how many tensors, and how many reductions a call has."""


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
                for jit_compile in compiled:
                    length = max(1, kib * 256 // count)
                    tensors = [tf.ones(length) for _ in range(count)]
                    copies = kc.replicate(tensors, devices)
                    chain = _chain(op, devices, jit_compile, times)
                    seconds = [
                        took / times
                        for took in _time(chain, copies, options.repeats)
                    ]
                    moved = 4 * length * count * 2 * (1 - 1 / len(devices))
                    yield {
                        "devices": len(devices),
                        "kib": kib,
                        "op": op,
                        "form": form,
                        "jit": jit_compile,
                        "us": [round(s * 1e6, 1) for s in seconds],
                        "busbw_gb_s": round(moved / min(seconds) / 1e9, 2),
                    }


def _chain(op: str, devices: Any, jit_compile: bool, times: int) -> Any:
    def chain(tensors: list) -> list:
        for _ in range(times):
            tensors = kc.allreduce(op, tensors)
            if op == "sum":  # or they would grow without end
                tensors = [tensor * (1 / len(devices)) for tensor in tensors]
        return tensors

    return kc.withdevices(chain, devices=devices, jit_compile=jit_compile)


def _time(chain: Any, copies: Any, repeats: int) -> list[float]:
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
