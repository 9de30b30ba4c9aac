"""Measures this machine: `python -m keras_conflux.bench`.

Each run is a process of its own, as strategies of several device counts and
their memory would disturb each other.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from rich.console import Console

from keras_conflux._program_cache import flags
from keras_conflux.bench import plot
from keras_conflux.bench import report

_console = Console(stderr=True)  # what is no result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m keras_conflux.bench")
    add_options(parser)
    return parser.parse_args(arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what can be measured to a parser of the command line."""
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2], help="counts"
    )
    parser.add_argument(
        "--models",
        nargs="*",
        default=["small"],
        choices=["resnet", "gpt", "small"],
    )
    parser.add_argument(
        "--how",
        nargs="+",
        default=["keras", "stock", "conflux"],
        choices=["keras", "stock", "conflux", "jax"],
        help="jax: the same Keras models on JAX, which has to be installed",
    )
    parser.add_argument(
        "--jit", nargs="+", default=["auto"], choices=["auto", "on", "off"]
    )
    parser.add_argument("--batch", type=int, help="samples per device")
    parser.add_argument("--steps", type=int, default=64, help="per epoch")
    parser.add_argument("--epochs", type=int, default=4, help="that are timed")
    parser.add_argument(
        "--breakdown", action="store_true", help="where a step's time goes"
    )
    parser.add_argument("--kib", type=int, nargs="*", default=[4, 65536])
    parser.add_argument("--ops", nargs="+", default=["sum", "mean", "max"])
    parser.add_argument("--out", type=Path, default=Path("bench"))
    parser.add_argument(
        "--draw",
        type=Path,
        nargs=2,
        metavar=("JSON", "IMAGE"),
        help="measure nothing; draw what a file of measurements holds",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the measurements as a JSON document instead of tables",
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs everything that the command line asks for and reports it.

    Returns:
        The exit status: 1 if a run failed, else 0.
    """
    return measure(parse(arguments))


def measure(options: argparse.Namespace) -> int:
    """Runs everything that was asked for and reports it.

    Args:
        options: What `add_options` reads.

    Returns:
        The exit status: 1 if a run failed, else 0.
    """
    if options.draw:
        plot.draw_file(*options.draw)
        return 0
    training = [_run("train", *each) for each in _training(options)]
    training += [_run("keras_jax", *each) for each in _on_jax(options)]
    collectives = [_run("collectives", *each) for each in _collectives(options)]
    measured = [line for done in training for line in _lines(done)]
    report.write(
        options.out,
        measured,
        [line for done in collectives for line in _lines(done)],
        as_json=options.json,
    )
    if measured:
        _draw(options.out)
    return int(any(done.returncode for done in training + collectives))


def _training(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yields the arguments of each run of `bench.train`."""
    extra = _sizes(options) + ["--breakdown"] * options.breakdown
    hows = [how for how in options.how if how != "jax"]
    for model, count, how, jit in product(
        options.models, options.devices, hows, options.jit
    ):
        # Plain Keras is for one device, the stock strategy for several.
        if (how == "keras" and count > 1) or (how == "stock" and count == 1):
            continue
        yield [model, how, str(count), f"--jit={jit}", *extra]


def _on_jax(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yields the arguments of each run of `bench.keras_jax`."""
    if "jax" in options.how:
        for model, count in product(options.models, options.devices):
            yield [model, str(count), *_sizes(options)]


def _sizes(options: argparse.Namespace) -> list[str]:
    sizes = [f"--steps={options.steps}", f"--epochs={options.epochs}"]
    return sizes + [f"--batch={options.batch}"] * bool(options.batch)


def _collectives(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yields the arguments of each run of `bench.collectives`."""
    sizes = [str(size) for size in options.kib]
    for count in options.devices:
        if count > 1 and sizes:
            yield [str(count), "--kib", *sizes, "--ops", *options.ops]


def _draw(folder: Path) -> None:
    try:
        plot.draw_file(folder / "bench.json", folder / "speed.png")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _console.print("There is no plot, as matplotlib is not installed.")


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Measures in a process of its own, and says if that failed."""
    _console.print(f"[dim]{module} {' '.join(arguments)}[/dim]")
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        **os.environ,
    }
    flags.remove(environ)  # other programs may not know them
    package, folder = "keras_conflux.bench", None
    if module == "keras_jax":  # which cannot import this package
        package, folder = "bench", Path(__file__).parent.parent
        environ["KERAS_BACKEND"] = "jax"
    done = subprocess.run(
        [sys.executable, "-m", f"{package}.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environ,
    )
    if done.returncode != 0:
        _console.print(f"[red]failed[/red]: {done.stderr.strip()[-500:]}")
    return done


def _lines(done: subprocess.CompletedProcess[str]) -> list[dict]:
    """Returns the measurements that a process printed, one per line."""
    return [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]


if __name__ == "__main__":
    sys.exit(main())
