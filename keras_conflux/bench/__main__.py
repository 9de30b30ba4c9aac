"""Measures this machine: `python -m keras_conflux.bench`.

Each run is a process of its own, as strategies of several device counts and
their memory would disturb each other.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import rich

from keras_conflux.bench import plot
from keras_conflux.bench import report


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m keras_conflux.bench")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2], help="counts"
    )
    parser.add_argument(
        "--models", nargs="*", default=["small"], help="resnet, gpt, small"
    )
    parser.add_argument(
        "--how", nargs="+", default=["keras", "stock", "conflux"]
    )
    parser.add_argument("--jit", nargs="+", default=["auto"], help="auto, off")
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
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs everything that was asked for and reports it."""
    options = parse(arguments)
    if options.draw:
        plot.draw_file(*options.draw)
        return
    training = []
    for model in options.models:
        for count in options.devices:
            for how in options.how:
                for jit in options.jit:
                    # Plain Keras is for one device, the stock strategy for
                    # several.
                    if (how == "keras" and count > 1) or (
                        how == "stock" and count == 1
                    ):
                        continue
                    extra = [f"--steps={options.steps}", f"--jit={jit}"]
                    extra += [f"--epochs={options.epochs}"]
                    if options.breakdown:
                        extra += ["--breakdown"]
                    if options.batch:
                        extra += [f"--batch={options.batch}"]
                    training += _run("train", model, how, str(count), *extra)
    collectives = []
    for count in options.devices:
        if count > 1 and options.kib:
            sizes = map(str, options.kib)
            collectives += _run(
                "collectives",
                str(count),
                "--kib",
                *sizes,
                "--ops",
                *options.ops,
            )
    report.write(options.out, training, collectives)
    if training:
        _draw(options.out)


def _draw(folder: Path) -> None:
    try:
        plot.draw_file(folder / "bench.json", folder / "speed.png")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        rich.print("There is no plot, as matplotlib is not installed.")


def _run(module: str, *arguments: str) -> list[dict]:
    """Returns the JSON lines that a process printed; none if it failed."""
    rich.print(f"[dim]{module} {' '.join(arguments)}[/dim]")
    done = subprocess.run(
        [sys.executable, "-m", f"keras_conflux.bench.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            **os.environ,
        },
    )
    if done.returncode != 0:
        rich.print(f"[red]failed[/red]: {done.stderr.strip()[-500:]}")
    return [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]


if __name__ == "__main__":
    main()
