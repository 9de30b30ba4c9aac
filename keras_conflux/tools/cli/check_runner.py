"""Runs the checks of `keras-conflux check`, each in a process of its own."""

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keras_conflux._extensions.launchers.order import without_launchers
from keras_conflux.tools.checks import nvidia
from keras_conflux.tools.checks.table import Check

START_SECONDS = 180
"""How long a check may take to begin. The first import of TensorFlow in an
environment takes more than a minute on a busy machine."""


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
    seconds: float
    values: dict[str, float]


class CheckRunner:
    """Runs checks, in their order.

    Args:
        devices: The number of devices that they are for.
        gpus: The number of GPUs.
        processes: The number of processes that one of them starts.
    """

    def __init__(
        self,
        devices: int,
        gpus: int,
        processes: int | None = None,
    ) -> None:
        self._devices = devices
        self._gpus = gpus
        self._processes = processes
        self._started: list[subprocess.Popen[str]] = []
        # Other checks compute on the GPUs as soon as the first one has begun.
        self._running = nvidia.processes() if gpus else []

    def results(self, checks: Sequence[Check]) -> Iterator[Result]:
        """Yields how each check ends; several run at once.

        Args:
            checks: The checks. Timed ones run alone.
        """
        # Most of a check is TensorFlow's import, which keeps one core busy.
        at_once = max(2, (os.cpu_count() or 1) // 4)
        for is_timed, group in itertools.groupby(checks, lambda x: x.is_timed):
            pool = ThreadPoolExecutor(1 if is_timed else at_once)
            try:
                yield from pool.map(self._run_check, group)
            finally:  # also after an interrupt, which comes in this thread
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self._started:
                    _kill_group(process)

    def command(self, name: str) -> list[str]:
        """Returns the command that runs a check.

        Args:
            name: The check.
        """
        module = ["-m", "keras_conflux.tools.checks", name]
        module += [f"--devices={self._devices}", f"--gpus={self._gpus}"]
        for process in self._running:
            module += ["--running", *process]
        if name == "processes":
            run = ["-m", "keras_conflux_command", "run", "--processes"]
            run += [str(self._processes), "--grace", "5"]
            return [sys.executable, *run, *module]
        return [sys.executable, *module]

    def _run_check(self, check: Check) -> Result:
        began = time.monotonic()
        # Its own group, so that all end that it starts.
        process = subprocess.Popen(
            self.command(check.name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(os.environ),
            process_group=0,
        )
        self._started.append(process)
        try:
            out, err = _output(process, check.limit)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
            _kill_group(process)
            out, err = process.communicate()
        finally:
            _kill_group(process)
        seconds = round(time.monotonic() - began, 1)
        said = _documents(out)
        at = next(
            (each["doing"] for each in said[::-1] if "doing" in each), None
        )
        if is_late:
            limit = check.limit if at else START_SECONDS
            text = f"hangs: ended after {limit:g} s in {at or 'its start'}"
            return Result(
                check.name, "wrong", text, check.if_it_hangs, seconds, {}
            )
        return _result(check, process.returncode, said, err, at, seconds)


def _output(process: "subprocess.Popen[str]", limit: float) -> tuple[str, str]:
    """Returns the output of a check that ends in time, once it has begun."""
    latest = time.monotonic() + START_SECONDS
    while True:
        try:
            return process.communicate(timeout=0.2)
        except subprocess.TimeoutExpired as late:
            if late.output:
                break
            if time.monotonic() > latest:
                raise
    return process.communicate(timeout=limit)


def _result(
    check: Check,
    status: int,
    said: list[dict[str, Any]],
    err: str,
    at: str | None,
    seconds: float,
) -> Result:
    """Returns the result of a check that has ended by itself."""
    for document in said:
        if "wrong" in document:
            text, todo = document["wrong"], document["todo"]
            return Result(check.name, "wrong", text, todo, seconds, {})
    passed = next((each for each in said if "text" in each), None)
    if status == 0 and passed:
        todo, values = passed["slow"] or "", passed["values"]
        usable = "slow" if todo else "good"
        return Result(check.name, usable, passed["text"], todo, seconds, values)
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
        seconds,
        {},
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
    """Returns the lines of JSON, also those behind the number of a process."""
    found = []
    for line in output.splitlines():
        _, brace, rest = line.partition("{")
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(brace + rest))
    return found
