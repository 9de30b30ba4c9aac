"""Runs the checks of `keras-conflux check`, each in a process of its own."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from keras_conflux._extensions.launchers.order import without_launchers
from keras_conflux.tools.checks.table import Check


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


def command(name: str, devices: int) -> list[str]:
    """Returns the command that runs a check.

    Args:
        name: The check.
        devices: The number of devices that it tries.
    """
    module = "keras_conflux.tools.checks"
    return [sys.executable, "-m", module, name, str(devices)]


def run_check(check: Check, devices: int) -> Result:
    """Runs a check in a process of its own, and returns how it ends.

    Args:
        check: The check.
        devices: The number of devices that it tries.
    """
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
    said = _documents(out)
    at = next((each["doing"] for each in said[::-1] if "doing" in each), None)
    if is_late:
        text = f"hangs: ended after {check.limit:g} s in {at or 'its start'}"
        result = Result(check.name, "wrong", text, check.if_it_hangs)
    else:
        result = _result(check, process.returncode, said, err, at)
    seconds = round(time.monotonic() - began, 1)
    return dataclasses.replace(result, seconds=seconds)


def _result(
    check: Check,
    status: int,
    said: list[dict[str, Any]],
    err: str,
    at: str | None,
) -> Result:
    """Returns the result of a check that has ended by itself."""
    for document in said:
        if "wrong" in document:
            text, todo = document["wrong"], document["todo"]
            return Result(check.name, "wrong", text, todo)
    passed = next((each for each in said if "text" in each), None)
    if status == 0 and passed:
        todo, values = passed["slow"] or "", passed["values"]
        usable = "slow" if todo else "good"
        return Result(check.name, usable, passed["text"], todo, values=values)
    how = f"exit status {status}"
    if status < 0:
        how = signal.strsignal(-status) or f"signal {-status}"
    last = (err.strip().splitlines() or ["it said nothing"])[-1]
    return Result(
        check.name,
        "wrong",
        f"ended ({how}) in {at or 'its start'}: {last}",
        f"`keras-conflux check --only {check.name} --json` and "
        "`keras-conflux env`, and report both",
    )


def _environment(environ: Any) -> dict[str, str]:
    """Returns the environment of a check, which trains alone."""
    # A launcher's variables would make it wait for others.
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        **without_launchers(environ),
    }


def _kill_group(process: "subprocess.Popen[str]") -> None:
    if process.returncode is None:
        # Not reaped, so the number still belongs to its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _documents(output: str) -> list[dict[str, Any]]:
    """Returns the lines of JSON."""
    found = []
    for line in output.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
