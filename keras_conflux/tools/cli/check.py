"""`keras-conflux check` tells whether training on this machine works."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from keras_conflux._devices.driver import visible_gpus
from keras_conflux._extensions.launchers.known import without_launchers
from keras_conflux.tools import add_count
from keras_conflux.tools import add_json
from keras_conflux.tools.checks import CHECKS
from keras_conflux.tools.checks import Check

_CPU_DEVICES = 2
"""How many logical CPU devices are tried where there is no GPU."""

_EPILOG = """exit status:
  0  all is good
  1  something is wrong
  3  all works, but slower than it should
"""
_STATUS = {"good": 0, "slow": 3, "wrong": 1}
_VERBS = {"wrong": "failed", "slow": "slower than usual"}


@dataclasses.dataclass(frozen=True)
class Result:
    """How a check has ended."""

    name: str
    status: str
    """`"good"`, `"slow"` or `"wrong"`."""
    text: str
    """The finding."""
    todo: str
    """The advice, unless it is good."""
    seconds: float = 0.0
    values: dict[str, float] = dataclasses.field(default_factory=dict)


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line."""
    parser = subcommands.add_parser(
        "check",
        help="tell in a minute whether training on this machine works",
        description=(
            "Tries in a minute all that a training on this machine needs. Each "
            "check is a process of its own with a time limit."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    devices = f"default: all GPUs, or {_CPU_DEVICES} logical CPU devices"
    add_count(parser, "--devices", 1, None, devices)
    names = [check.name for check in CHECKS]
    some = f"some of: {', '.join(names)}"
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="CHECK", help=some
    )
    add_json(parser)
    parser.set_defaults(main=main, error=parser.error)


def main(options: argparse.Namespace) -> int:
    """Runs the checks, reports them, and returns the exit status."""
    gpus = len(visible_gpus(os.environ))
    devices = options.devices or gpus or _CPU_DEVICES
    results = []
    for check in CHECKS:
        # CPU devices share one CPU.
        has_sense = check.name != "faster" or (gpus > 0 and devices > 1)
        if has_sense and check.name in (options.only or [check.name]):
            results.append(run_check(check, devices))
            if not options.json:
                print(line(results[-1]), flush=True)
    said = sentence(results, devices, gpus)
    if options.json:
        checks = [dataclasses.asdict(result) for result in results]
        print(json.dumps({"sentence": said, "checks": checks}, indent=1))
    else:
        print(f"\n{said}")
    found = {result.status for result in results}
    return _STATUS[next((each for each in _VERBS if each in found), "good")]


def sentence(results: list[Result], devices: int, gpus: int) -> str:
    """Returns a summary in a sentence; without GPUs, of devices of the CPU."""
    what = f"{devices} {'GPU' if gpus else 'logical CPU device'}"
    what += "s" if devices > 1 else ""
    for status, verb in _VERBS.items():
        names = [each.name for each in results if each.status == status]
        if names:
            counted = f"{len(names)} of {len(results)} checks"
            return f"{what}: {counted} {verb}: {', '.join(names)}."
    ratios = [x.values["ratio"] for x in results if "ratio" in x.values]
    if ratios:
        return f"{what}, all good: {ratios[0]:.2f} times as fast as one."
    if gpus:
        return f"{what}, all good."
    return (
        f"{what}, all good. There is no GPU, so this says nothing about speed."
    )


def line(result: Result) -> str:
    """Returns the line of the terminal for a result."""
    mark = "ok" if result.status == "good" else result.status
    seconds = f"{result.seconds:.0f} s"
    shown = f"{mark:<6}{result.name:<13}{result.text}  {seconds}"
    return f"{shown}\n      type: {result.todo}" if result.todo else shown


def command(name: str, devices: int) -> list[str]:
    """Returns the command that runs a check on a number of devices."""
    module = "keras_conflux.tools.checks"
    return [sys.executable, "-m", module, name, str(devices)]


def run_check(check: Check, devices: int) -> Result:
    """Runs a check in a process of its own, and returns how it ends."""
    began = time.monotonic()
    # Its own group, so that all end that it starts.
    process = subprocess.Popen(
        command(check.name, devices),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(os.environ),
        process_group=0,
    )
    try:
        out, err = process.communicate(timeout=check.limit)
        is_late = False
    except subprocess.TimeoutExpired:
        is_late = True
        _kill_group(process)
        out, err = process.communicate()
    finally:  # also after an interrupt
        _kill_group(process)
    said = {"doing": "its start"}
    for each in out.splitlines():
        with contextlib.suppress(TypeError, ValueError):  # it is no document
            said |= json.loads(each)
    if is_late:
        text = f"hangs: ended after {check.limit:g} s in {said['doing']}"
        result = Result(check.name, "wrong", text, check.if_it_hangs)
    else:
        result = _result(check, process.returncode, said, err)
    seconds = round(time.monotonic() - began, 1)
    return dataclasses.replace(result, seconds=seconds)


def _result(
    check: Check, status: int, said: dict[str, Any], err: str
) -> Result:
    """Returns the result of a check that has ended by itself."""
    if "wrong" in said:
        return Result(check.name, "wrong", said["wrong"], said["todo"])
    if status == 0 and "text" in said:
        todo, values = said["slow"] or "", said["values"]
        usable = "slow" if todo else "good"
        return Result(check.name, usable, said["text"], todo, values=values)
    how = f"exit status {status}"
    if status < 0:
        how = signal.strsignal(-status) or f"signal {-status}"
    last = (err.strip().splitlines() or ["it said nothing"])[-1]
    return Result(
        check.name,
        "wrong",
        f"ended ({how}) in {said['doing']}: {last}",
        f"`keras-conflux check --only {check.name} --json` and "
        "`keras-conflux env`, and report both",
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a check, which trains alone."""
    # A launcher's variables would make it wait for others.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    return quiet | without_launchers(environ)


def _kill_group(process: "subprocess.Popen[str]") -> None:
    if process.returncode is None:
        # Not reaped, so the number still belongs to its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
