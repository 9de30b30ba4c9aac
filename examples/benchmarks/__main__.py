"""Measures this machine: `python -m examples.benchmarks`.

It says first what it will run, where, and about how long that takes. Each run
is a process of its own, as strategies of several device counts and their memory
would disturb each other.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from rich.console import Console

from examples.benchmarks import measured
from examples.benchmarks import plan
from examples.benchmarks import plot
from examples.benchmarks import report
from examples.benchmarks.cases import CASES
from examples.benchmarks.runs import Run
from examples.benchmarks.runs import Runner

_console = Console(stderr=True)  # what is no result
_ON_KERAS = ("keras", "stock", "conflux")
_ON_TORCH = ("torch", "torch-eager")
_NO_TRAININGS = ("attention", "augmentation")
"""Modules of a list that are told neither steps nor devices."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks")
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        default=[1, 2],
        help="how many; of several counts each is measured",
    )
    parser.add_argument(
        "--models",
        nargs="*",
        default=["small"],
        choices=list(CASES),
        help="what is trained; the default takes a minute or two on CPUs",
    )
    parser.add_argument(
        "--how",
        nargs="+",
        default=["keras", "stock", "conflux"],
        choices=[*_ON_KERAS, "jax", *_ON_TORCH],
        help="jax: the same Keras models on JAX; torch: the same layers in "
        "PyTorch, compiled; torch-eager: not compiled. Both have to be "
        "installed",
    )
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="PEER=COMMAND",
        help="what starts the Python that has JAX or PyTorch, such as "
        "torch=/opt/torch/bin/python or jax='env -u XLA_FLAGS python3'",
    )
    parser.add_argument(
        "--jit",
        nargs="+",
        default=["auto"],
        choices=["auto", "on", "off"],
        help="whether XLA compiles; auto leaves it to Keras",
    )
    parser.add_argument(
        "--shard",
        nargs="+",
        default=["none"],
        choices=["none", "optimizer", "weights"],
        help="what each of several devices keeps a part of, with conflux",
    )
    measured.add_sizes(parser)
    parser.add_argument(
        "--breakdown", action="store_true", help="where a step's time goes"
    )
    parser.add_argument(
        "--kib",
        type=int,
        nargs="*",
        default=[],
        help="measure collectives of so many KiB as well, such as 4 65536",
    )
    parser.add_argument(
        "--ops",
        nargs="+",
        default=["sum", "mean", "max"],
        help="the collectives of --kib",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench"),
        help="the folder for what is measured",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would be measured, and measure nothing",
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="keep the runs that an earlier call has finished in --out",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="end a process that takes longer",
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="how often each training is started, with what the first has "
        "cached; all epochs count",
    )
    parser.add_argument(
        "--list",
        type=Path,
        metavar="FILE",
        help="make the runs that a file lists, in its order, and print each "
        "when it ends. A line has a time limit in seconds, a module and what "
        "it is told; 90x2 starts it twice",
    )
    parser.add_argument(
        "--gpus",
        nargs="+",
        default=[],
        metavar="GPU",
        help="deal these out, each with its part of the cores, so that runs "
        "of few devices go side by side; 0 1 2 3 makes two lanes of two",
    )
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
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs everything that the command line asks for and reports it.

    Returns:
        The exit status: 1 if a run failed, else 0.
    """
    options = parse(arguments)
    if options.draw:
        plot.draw_file(*options.draw)
        return 0
    if options.list:
        runs = [*_listed(options)]
    else:
        runs = [*_training(options), *_peers(options), *_collectives(options)]
    most = max((run.devices for run in runs), default=0)
    if 0 < len(options.gpus) < most:
        raise SystemExit(
            f"Expected with --gpus at least {most} GPUs, as many as a run "
            f"needs. Received: {' '.join(options.gpus)}"
        )
    will = plan.described(
        runs,
        options.steps * options.epochs,
        options.starts,
        options.gpus,
        options.out,
    )
    _console.print(will, soft_wrap=True, highlight=False)
    if options.dry_run:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runner = Runner(
        options.out / "runs",
        _pythons(options.python),
        options.limit,
        options.starts,
        options.gpus,
    )
    found: dict[Run, list[dict]] = {}
    began = time.monotonic()
    try:
        for run, lines in runner.measure(runs, options.go_on):
            found[run] = lines
            for line in lines if options.list else []:
                print(json.dumps(line), flush=True)
            left = len(runs) - len(found)
            if left:
                mean = (time.monotonic() - began) / len(found)
                _console.print(f"{left} left, {plan.in_words(left * mean)}")
    finally:
        _report(options, [run for run in runs if run in found], found)
    return int(not all(found.values()))


def _report(
    options: argparse.Namespace, runs: list[Run], found: dict[Run, list[dict]]
) -> None:
    """Shows what has been measured, and writes it."""
    lines = [line for run in runs for line in found[run]]
    report.write(options.out, lines, as_json=options.json)
    if report.of_kind(lines)["training"]:
        _draw(options.out)


def _pythons(texts: list[str]) -> dict[str, list[str]]:
    """Returns the commands that start the Python of peers."""
    commands = {}
    for text in texts:
        peer, _, command = text.partition("=")
        if peer not in ("jax", "torch") or not command:
            raise SystemExit(
                "Expected --python jax=COMMAND or torch=COMMAND. Received: "
                f"{text}"
            )
        first, *others = shlex.split(command)
        if os.sep in first:  # it is started in another folder
            first = os.path.abspath(first)
        commands[peer] = [first, *others]
    return commands


def _listed(options: argparse.Namespace) -> Iterator[Run]:
    """Yields the runs that a file lists; what follows a `#` is a comment.

    Sizes that a line gives count for its run.
    """
    for line in options.list.read_text().splitlines():
        words = line.partition("#")[0].split()
        if words:
            first, module, *arguments = words
            limit, _, starts = first.partition("x")
            is_training = module not in _NO_TRAININGS
            counts = [int(word) for word in arguments if word.isdigit()]
            sizes = [
                size
                for size in (_sizes(options) if is_training else ())
                if size.partition("=")[0] not in arguments
            ]
            yield Run(
                module,
                counts[0] if is_training else 1,
                (*arguments, *sizes),
                is_training,
                limit=float(limit),
                starts=int(starts) if starts else None,
            )


def _training(options: argparse.Namespace) -> Iterator[Run]:
    """Yields the runs of `benchmarks.train`."""
    extra = _sizes(options) + ["--breakdown"] * options.breakdown
    hows = [how for how in options.how if how in _ON_KERAS]
    for model, count, how, jit, shard in product(
        options.models, options.devices, hows, options.jit, options.shard
    ):
        if shard != "none" and (how != "conflux" or count == 1):
            continue
        # Plain Keras is for one device, the stock strategy for several.
        if (how == "keras" and count > 1) or (how == "stock" and count == 1):
            continue
        arguments = model, how, str(count), f"--jit={jit}", *extra
        if shard != "none":
            arguments = *arguments, f"--shard={shard}"
        yield Run("train", count, arguments)


def _peers(options: argparse.Namespace) -> Iterator[Run]:
    """Yields the runs that need not have what this package imports."""
    for model, count, how in product(
        options.models, options.devices, options.how
    ):
        sizes = _sizes(options)
        if how == "jax":
            yield Run("keras_jax", count, (model, str(count), *sizes))
        elif how in _ON_TORCH:
            yield Run("pytorch", count, (model, how, str(count), *sizes))


def _sizes(options: argparse.Namespace) -> list[str]:
    names = ("steps", "epochs", "batches")
    sizes = [f"--{name}={getattr(options, name)}" for name in names]
    return sizes + [f"--batch={options.batch}"] * bool(options.batch)


def _collectives(options: argparse.Namespace) -> Iterator[Run]:
    """Yields the runs of `benchmarks.collectives`."""
    sizes = [str(size) for size in options.kib]
    for count in options.devices:
        if count > 1 and sizes:
            arguments = str(count), "--kib", *sizes, "--ops", *options.ops
            yield Run("collectives", count, arguments, is_training=False)


def _draw(folder: Path) -> None:
    try:
        plot.draw_file(folder / "bench.json", folder / "speed.png")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        _console.print("There is no plot, as matplotlib is not installed.")


if __name__ == "__main__":
    sys.exit(main())
