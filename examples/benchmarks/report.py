"""Tables and JSON of what was measured."""

import json
import platform
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

WIDTH = 140
"""Of tables that are written to a file, in characters."""


def machine() -> dict:
    """Describes the machine and the versions that were measured."""
    import keras
    import tensorflow as tf

    return {
        "gpus": gpus(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def gpus() -> list[str]:
    """Returns what the GPUs of this machine are called."""
    import tensorflow as tf

    return [
        tf.config.experimental.get_device_details(gpu).get("device_name")
        for gpu in tf.config.list_physical_devices("GPU")
    ]


def milliseconds(result: dict) -> float:
    """The median time of a step."""
    return statistics.median(result["ms_a_step"])


def name(result: dict) -> str:
    """What has trained: a package, and what it was told besides."""
    return f"{result['how']} {result.get('tuning', '')}".strip()


def best(results: list[dict]) -> list[dict]:
    """Returns the fastest of the runs of each package that train the same."""
    fastest: dict[tuple, dict] = {}
    for result in results:
        kind = (
            *(result.get(key) for key in KIND),
            is_of_other_form(result),
        )
        if kind not in fastest or milliseconds(result) < milliseconds(
            fastest[kind]
        ):
            fastest[kind] = result
    return [*fastest.values()]


KIND = ("model", "how", "devices", "batch", "jit", "variant")
"""The fields that are alike in runs that train the same."""


def is_of_other_form(result: dict) -> bool:
    """Whether its model is no faster way to train the same one."""
    return "torchvision" in result.get("tuning", "")


def shown(document: dict) -> list[dict]:
    """Returns what is shown of a document of measurements.

    That is what is marked as `shown`, and otherwise the fastest of each
    package.
    """
    runs = document["training"] + document.get("peers", [])
    return [run for run in runs if run.get("shown")] or best(runs)


def throughput(result: dict) -> float:
    """Images or tokens per second."""
    return result["units_a_step"] / milliseconds(result) * 1e3


def efficiency(result: dict, results: list[dict]) -> float | None:
    """Throughput over that of as many single devices of the same kind.

    Against this package on one device, for that is the faster single one.
    """
    for other in results:
        if (
            other["devices"] == 1
            and other["how"] == "conflux"
            and all(
                other[key] == result[key] for key in ("model", "batch", "jit")
            )
        ):
            return throughput(result) / throughput(other) / result["devices"]
    return None


def training_table(results: list[dict]) -> Table:
    """One row per run of `fit`."""
    table = Table(title="model.fit")
    for heading in ("model", "how", "devices", "batch", "jit"):
        table.add_column(heading)
    for heading in (
        "ms per step",
        "spread",
        "per second",
        "efficiency",
        "peak GB",
        "first start s",
        "second start s",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        times = result["ms_a_step"]
        share = efficiency(result, results)
        peak = max(result["peak_bytes"], default=0) / 1e9
        table.add_row(
            result["model"],
            name(result),
            str(result["devices"]),
            str(result["batch"]),
            result["jit"],
            f"{milliseconds(result):.2f}",
            f"{(max(times) - min(times)) / min(times):.1%}",
            f"{throughput(result):,.0f} {result['unit']}",
            "" if share is None else f"{share:.1%}",
            f"{peak:.1f}" if peak else "",
            *(_seconds(result, key) for key in ("start_s", "second_start_s")),
        )
    return table


def _seconds(result: dict, key: str) -> str:
    return f"{result[key]:.1f}" if key in result else ""


def parts(result: dict) -> dict[str, float]:
    """Returns where the time of a step goes, in milliseconds.

    `fit`: a step of `fit`; `alone`: a step in which replicas exchange nothing;
    `exchange`: the exchange that computation does not hide; `rest`: of a step
    of `fit`, which is late input and the start of executions; `execution`: an
    execution besides its steps; `batch`: splitting and moving a batch.
    """
    found, fit = result["breakdown"], milliseconds(result)
    return {
        "fit": fit,
        "alone": found["alone_ms"],
        "exchange": found["step_ms"] - found["alone_ms"],
        "rest": fit - found["step_ms"],
        "execution": found["call_ms"],
        "batch": found["input_ms"],
    }


def breakdown_table(results: list[dict]) -> Table:
    """One row per run of `fit` whose steps were broken down."""
    table = Table(title="where the time goes, ms")
    for name in ("model", "devices", "jit"):
        table.add_column(name)
    for name in parts(results[0]):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result["model"],
            str(result["devices"]),
            result["jit"],
            *(f"{ms:.2f}" for ms in parts(result).values()),
        )
    return table


def collectives_table(results: list[dict]) -> Table:
    """One row per kind of all-reduce."""
    table = Table(title="allreduce")
    for name in ("devices", "KiB", "op", "form", "XLA"):
        table.add_column(name)
    for name in ("us", "bus GB/s", "us per call"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            str(result["devices"]),
            str(result["kib"]),
            result["op"],
            result["form"],
            "yes" if result["jit"] else "no",
            f"{statistics.median(result['us']):.1f}",
            f"{result['busbw_gb_s']:.1f}",
            f"{result['call_us']:.0f}",
        )
    return table


def of_kind(lines: list[dict]) -> dict[str, list[dict]]:
    """Returns what has been measured, as `bench.json` holds it."""
    kinds: dict[str, list[dict]] = {name: [] for name in _FIELDS}
    for line in lines:
        kind = next(name for name, field in _FIELDS.items() if field in line)
        kinds[kind].append(line)
    return kinds


_FIELDS = {
    "training": "start_s",
    "collectives": "kib",
    "augmentation": "layer",
    "attention": "attention",
}
"""The kinds of measurements, and a field that only these have."""


def write(folder: Path, lines: list[dict], as_json: bool = False) -> None:
    """Prints the tables, or what `bench.json` holds, and writes that file."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = of_kind(lines)
    text = json.dumps({"machine": machine(), **kinds}, indent=1)
    (folder / "bench.json").write_text(f"{text}\n")
    if as_json:
        print(text)
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if kinds["training"]:
        console.print(training_table(kinds["training"]))
        broken_down = [run for run in kinds["training"] if "breakdown" in run]
        if broken_down:
            console.print(breakdown_table(broken_down))
    if kinds["collectives"]:
        console.print(collectives_table(kinds["collectives"]))
