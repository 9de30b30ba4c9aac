"""`conflux check` tells whether training on this machine works."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from keras_conflux.checks.table import CHECKS
from keras_conflux.checks.table import Check
from keras_conflux.cli.gpus import visible_gpus
from keras_conflux.cli.options import add_json
from keras_conflux.cli.options import at_least

_CPU_DEVICES = 2
"""How many logical CPU devices are tried where there is no GPU."""
_STATUS = {"good": 0, "slow": 3, "wrong": 1}
_MARKS = {"good": ("ok", "green"), "slow": ("slow", "yellow")}
_WRONG = ("wrong", "bold red")
_WIDTH = 88

_EPILOG = """exit status:
  0  all is good
  1  something is wrong
  3  all works, but slower than it should (with --strict: 1)
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a check has ended."""

    name: str
    status: str
    """`"good"`, `"slow"` or `"wrong"`."""
    text: str
    """What was found."""
    todo: str
    """What to type, unless it is good."""
    seconds: float
    values: dict[str, float]


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line.

    Args:
        subcommands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subcommands.add_parser(
        "check",
        help="tell in a minute whether training on this machine works",
        description=(
            "Tries in a minute what a training on this machine needs. Each "
            "check is a process of its own with a time limit."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        type=at_least(1),
        metavar="N",
        help=f"default: all GPUs, or {_CPU_DEVICES} logical CPU devices",
    )
    parser.add_argument(
        "--processes",
        type=at_least(2),
        metavar="N",
        help="also start so many processes, as `conflux run` does",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="PATH",
        help="also write checkpoints there: how fast, and resume from one",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[check.name for check in CHECKS],
        metavar="CHECK",
        help=f"some of: {', '.join(check.name for check in CHECKS)}",
    )
    parser.add_argument(
        "--strict", action="store_true", help="what is slow is wrong"
    )
    add_json(parser)
    parser.add_argument(
        "--draw",
        type=Path,
        nargs=2,
        metavar=("JSON", "SVG"),
        help="check nothing; draw what --json has printed",
    )
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Runs the checks and reports them.

    Args:
        options: The command line.

    Returns:
        The exit status.
    """
    if options.draw:
        _draw(*options.draw)
        return 0
    gpus = len(visible_gpus(os.environ))
    devices = options.devices or gpus or _CPU_DEVICES
    console = Console(quiet=options.json, highlight=False)
    checks = _chosen(options, several_gpus=gpus > 0 and devices > 1)
    running = _run_all(checks, options, devices, gpus)
    results = []
    for check in checks:
        with _saying(console, check.name):
            results.append(next(running))
        console.print(_line(results[-1]), soft_wrap=True)
    said = sentence(results, devices, gpus)
    console.print(f"\n{said}", soft_wrap=True)
    if options.json:
        found = [dataclasses.asdict(result) for result in results]
        typed = "conflux check"
        if options.directory:
            typed += f" --directory {options.directory}"
        document = {"typed": typed, "sentence": said, "checks": found}
        print(json.dumps(document, indent=1))
    return exit_status(results, options.strict)


def exit_status(results: list[Result], strict: bool) -> int:
    """Returns the exit status of `conflux check`."""
    found = {result.status for result in results}
    if "slow" in found and strict:
        found.add("wrong")
    worst = next(s for s in ("wrong", "slow", "good") if s in {*found, "good"})
    return _STATUS[worst]


def sentence(results: list[Result], devices: int, gpus: int) -> str:
    """Returns what a user wants to know, in a sentence.

    Args:
        results: Those of all checks.
        devices: How many devices they were for.
        gpus: How many GPUs there are; 0 if the devices are of the CPU.
    """
    what = f"{devices} {'GPU' if gpus else 'logical CPU device'}"
    what += "s" if devices > 1 else ""
    for status, verb in (("wrong", "failed"), ("slow", "slower than usual")):
        names = [each.name for each in results if each.status == status]
        if names:
            counted = f"{len(names)} of {len(results)} checks"
            return f"{what}: {counted} {verb}: {', '.join(names)}."
    ratio = next(
        (each.values["ratio"] for each in results if "ratio" in each.values),
        None,
    )
    if ratio is not None:
        return f"{what}, all good: {ratio:.2f} times as fast as one."
    if gpus:
        return f"{what}, all good."
    return (
        f"{what}, all good. There is no GPU, so this says nothing about speed."
    )


def _chosen(options: argparse.Namespace, several_gpus: bool) -> list[Check]:
    """Returns the checks to run; some need an option, or several GPUs."""
    asked = {
        "disk": options.directory,
        "resume": options.directory,
        "processes": options.processes,
        "faster": several_gpus,
    }
    return [
        check
        for check in CHECKS
        if asked.get(check.name, True)
        and (not options.only or check.name in options.only)
    ]


def command(
    name: str, options: argparse.Namespace, devices: int, gpus: int
) -> list[str]:
    """Returns what runs a check.

    Args:
        name: The check.
        options: The command line.
        devices: How many devices it is for.
        gpus: How many GPUs there are.
    """
    module = ["-m", "keras_conflux.checks", name]
    module += [f"--devices={devices}", f"--gpus={gpus}"]
    if options.directory:
        module.append(f"--directory={options.directory}")
    if name == "processes":
        run = ["-m", "conflux_command", "run", "--processes"]
        run += [str(options.processes), "--grace", "5"]
        return [sys.executable, *run, *module]
    return [sys.executable, *module]


def _run_all(
    checks: list[Check], options: argparse.Namespace, devices: int, gpus: int
) -> Iterator[Result]:
    """Runs checks, in their order; on CPUs, two that are not timed at once."""
    started: list[subprocess.Popen[str]] = []

    def run(check: Check) -> Result:
        return _run(check, options, devices, gpus, started)

    # Most of a check is the import of TensorFlow, which keeps one core busy.
    at_once = 1 if gpus else 2
    for is_timed, group in itertools.groupby(checks, lambda x: x.is_timed):
        pool = ThreadPoolExecutor(1 if is_timed else at_once)
        try:
            yield from pool.map(run, group)
        finally:  # also after an interrupt, which comes in this thread
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                _end(process)


def _run(
    check: Check,
    options: argparse.Namespace,
    devices: int,
    gpus: int,
    started: list["subprocess.Popen[str]"],
) -> Result:
    """Runs a check in a process of its own, and notes the process."""
    began = time.monotonic()
    # Its own group, so that all end that it starts.
    process = subprocess.Popen(
        command(check.name, options, devices, gpus),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(os.environ),
        process_group=0,
    )
    started.append(process)
    try:
        out, err = process.communicate(timeout=check.limit)
        is_late = False
    except subprocess.TimeoutExpired:
        is_late = True
        _end(process)
        out, err = process.communicate()
    finally:
        _end(process)
    seconds = round(time.monotonic() - began, 1)
    said = _documents(out)
    at = next((each["doing"] for each in said[::-1] if "doing" in each), None)
    if is_late:
        text = f"hangs: ended after {check.limit:g} s in {at or 'its start'}"
        return Result(check.name, "wrong", text, check.if_it_hangs, seconds, {})
    return _result(check, process.returncode, said, err, at, seconds)


def _result(
    check: Check,
    status: int,
    said: list[dict[str, Any]],
    err: str,
    at: str | None,
    seconds: float,
) -> Result:
    """Returns what a check has found that has ended by itself."""
    for document in said:
        if "wrong" in document:
            text, todo = document["wrong"], document["todo"]
            return Result(check.name, "wrong", text, todo, seconds, {})
    passed = next((each for each in said if "text" in each), None)
    if status == 0 and passed:
        slow = passed["slow"]
        return Result(
            check.name,
            "slow" if slow else "good",
            passed["text"],
            slow or "",
            seconds,
            passed["values"],
        )
    how = f"exit status {status}"
    if status < 0:
        how = signal.strsignal(-status) or f"signal {-status}"
    last = (err.strip().splitlines() or ["it said nothing"])[-1]
    return Result(
        check.name,
        "wrong",
        f"ended ({how}) in {at or 'its start'}: {last}",
        f"`conflux check --only {check.name} --json` and `conflux env`, and "
        "report both",
        seconds,
        {},
    )


def _environment(environ: Any) -> dict[str, str]:
    """Returns the environment of a check, which trains alone."""
    # What a launcher has set would make it wait for others.
    kept = {
        name: value
        for name, value in environ.items()
        if name != "TF_CONFIG" and not name.startswith("KERAS_DISTRIBUTION_")
    }
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        **kept,
    }


def _end(process: "subprocess.Popen[str]") -> None:
    if process.returncode is None:
        # Not reaped, so the number is still that of its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _documents(output: str) -> list[dict[str, Any]]:
    """Returns the lines of JSON, also those behind the number of a process."""
    found = []
    for line in output.splitlines():
        _, brace, rest = line.partition("{")
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(brace + rest))
    return found


@contextlib.contextmanager
def _saying(console: Console, name: str) -> Iterator[None]:
    """Shows on a terminal what is being checked."""
    if console.is_terminal and not console.quiet:
        with console.status(name):
            yield
    else:
        yield


def _line(result: Result) -> Text:
    mark, style = _MARKS.get(result.status, _WRONG)
    line = Text.assemble(
        (f"{mark:<6}", style),
        (f"{result.name:<13}", "bold"),
        f"{result.text}",
        (f"  {result.seconds:.0f} s", "dim"),
    )
    if result.todo:
        line.append(f"\n      type: {result.todo}", style)
    return line


def _draw(source: Path, image: Path) -> None:
    """Draws a terminal with what `--json` has printed."""
    document = json.loads(source.read_text())
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True,
            width=_WIDTH,
            file=nowhere,
            force_terminal=True,
            highlight=False,
        )
        console.print(f"$ {document['typed']}", style="dim")
        for result in document["checks"]:
            console.print(_line(Result(**result)))
        console.print(f"\n{document['sentence']}", style="bold")
    drawn = console.export_svg(
        title="conflux check", code_format=_SVG, unique_id="check"
    )
    image.write_text("\n".join(map(str.rstrip, drawn.splitlines())) + "\n")


# That of rich, without fonts from elsewhere, shadows and buttons.
_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>What conflux check prints</title>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect fill="#0c0c0c" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})"
   clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
