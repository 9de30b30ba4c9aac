"""Trainings of several processes with a fault drawn by lot, many of them.

    python tests/lot.py --runs 200 --seed 1 --at-once 12
    python tests/lot.py --runs 50 --seed 1 --at-once 12 --restarts
    python tests/lot.py --only 17 --seed 1

In each run, a process does something wrong at some moment. All others have to
end with an error, in time, and whatever any of them has computed before has to
be what one device computes. With `--restarts`, the process is killed and
`keras-conflux run` starts all of them again: they must end as one device does.

A failure is printed with what was drawn. `--only` repeats it.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from addresses import free_addresses
from addresses import tf_config
from local_cases import Parts
from lot_training import FORMS
from lot_training import Training
from models import assert_same_outcome

HERE = pathlib.Path(__file__).parent
HEARTBEAT = 5
STEP_TIMEOUT = 60
SECONDS_OF_RUN = 300
"""How long a run may take where nothing goes wrong, or before it does."""

# How often a training comes to a place, or a little less.
VISITS = {
    "between fits": 2,
    "data": 18,
    "train batch": 18,
    "validation data": 16,
    "validation batch": 6,
    "epoch end": 6,
    "saving": 6,
}
SECONDS_OF_TRAINING = 8.0
ONE_AT_A_TIME = threading.Lock()
ANYWHERE = ("any time", *VISITS)
IN_CALLBACKS = ("train batch", "validation batch", "epoch end", "saving")
OUT_OF_STEPS = ("between fits", "train batch", "epoch end")
PLACES = {
    "killed": ANYWHERE,
    "stopped": ANYWHERE,
    "gets stuck": tuple(VISITS),
    "cut off": ANYWHERE,
    "leaves": ANYWHERE,
    "interrupted": ANYWHERE,
    "raises": tuple(VISITS),
    "exits": ("between fits", *IN_CALLBACKS),
    "sleeps": tuple(VISITS),
    "stops early": ("train batch", "epoch end"),
    "evaluates": OUT_OF_STEPS,
    "predicts": OUT_OF_STEPS,
    "saves": OUT_OF_STEPS,
    "fits": OUT_OF_STEPS,
    "waits at a barrier": OUT_OF_STEPS,
    "fails in the graph": ("between fits", *IN_CALLBACKS[:3]),
    "other data": ("data", "validation data"),
    "fewer batches": ("data",),
    "other activation": ("start",),
    "other loss": ("start",),
    "frozen in one process": ("start",),
    "learning rate by one process": ("train batch", "epoch end"),
    "set_weights by one process": ("train batch", "epoch end"),
}
OF_STATE = ("learning rate by one process", "set_weights by one process")
OF_COMMON_DATA = ("other data", "fewer batches", "fits")
"""Parts of one's own may be so. A `fit` more, too, is one with other parts."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """What happens in a run."""

    processes: int
    devices: int
    form: str
    data: str
    fault: str
    wrong: int
    """Which process does it."""
    place: str
    visit: float
    """At which of its visits of the place; at any time, after how many seconds.
    """
    resumes_with: str | None = None
    heartbeat: float = HEARTBEAT

    @property
    def patience(self) -> float:
        """For how many seconds the others wait for one that lives."""
        return STEP_TIMEOUT if self.fault == "gets stuck" else 0

    @property
    def stays(self) -> bool:
        """Whether the process that is wrong cannot end by itself."""
        return self.fault in ("stopped", "gets stuck")


def drawn(seed: int, number: int, restarts: bool) -> Draw:
    """Draws a run. The same numbers give the same one."""
    choose = random.Random(f"{seed} {number} {restarts}")
    fault = "killed" if restarts else choose.choice(list(PLACES))
    place = choose.choice(PLACES[fault])
    processes = choose.choice([2, 3])
    visit: float = choose.randrange(VISITS.get(place, 1))
    if place == "any time":
        visit = round(choose.uniform(0, SECONDS_OF_TRAINING), 2)
    resumes_with = choose.choice(["BackupAndRestore", "Resume"])
    data = choose.choice(["global", "local"])
    # `Resume` refuses parts of one's own.
    is_common = (
        resumes_with == "Resume" if restarts else fault in OF_COMMON_DATA
    )
    return Draw(
        processes,
        devices=choose.choice([1, 2]),
        form=choose.choice(list(FORMS)),
        data="global" if is_common else data,
        fault=fault,
        # The first process is the one that saves.
        wrong=0 if place == "saving" else choose.randrange(processes),
        place=place,
        visit=visit,
        resumes_with=resumes_with if restarts else None,
    )


@dataclasses.dataclass
class Report:
    """What a process has written of itself."""

    told: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    told_at: dict[str, float] = dataclasses.field(default_factory=dict)
    fault_at: float | None = None
    error: dict[str, Any] | None = None
    ended: bool = False
    gone_at: float | None = None
    """When the process was no longer there, if it has ended by itself."""


def read(path: pathlib.Path) -> Report:
    report = Report()
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    for line in map(json.loads, lines):
        if "name" in line:
            report.told[line["name"]] = np.asarray(line["value"])
            report.told_at[line["name"]] = line["at"]
        elif "fault" in line:
            report.fault_at = line["at"]
        elif "error" in line:
            report.error = line
        else:
            report.ended = True
    return report


@functools.cache
def on_one_device(
    processes: int, form: str, resumes_with: str | None
) -> dict[str, np.ndarray]:
    told: dict[str, np.ndarray] = {}
    Training(
        form,
        Parts(processes),
        lambda name, value: told.update({name: np.asarray(value, "float64")}),
        resumes_with=resumes_with,
    ).run(lambda model: model)
    return told


def expected_of(draw: Draw) -> dict[str, np.ndarray]:
    with ONE_AT_A_TIME:
        return on_one_device(draw.processes, draw.form, draw.resumes_with)


def judged(
    draw: Draw,
    reports: list[Report],
    expected: dict[str, np.ndarray],
    limit: float,
) -> list[str]:
    """Returns what is wrong with a run in which something has gone wrong."""
    fault_at = reports[draw.wrong].fault_at
    # What changes the state is found when the epoch ends.
    until = fault_at if draw.fault in OF_STATE else None
    complaints = [
        f"process {index}: {complaint}"
        for index, report in enumerate(reports)
        for complaint in of_values(told_until(until, report), expected)
    ]
    is_harmless = draw.fault == "sleeps" or fault_at is None
    may_end = draw.fault == "stops early" or draw.place == "any time"
    for index, report in enumerate(reports):
        if index == draw.wrong and not is_harmless:
            if not (draw.stays or report.gone_at):
                complaints.append(f"process {index} has not ended")
            continue
        who = f"process {index}"
        if is_harmless or (may_end and report.ended):
            if not report.ended:
                complaints.append(f"{who} has not ended well: {report.error}")
            elif report.told.keys() != expected.keys():
                missing = expected.keys() - report.told.keys()
                complaints.append(f"{who} has ended without {missing}")
        elif report.error is None:
            has = "has ended well" if report.ended else "hangs"
            complaints.append(f"{who} {has}")
        else:
            since = (fault_at or 0) + draw.patience
            complaints += of_error(who, report, since, limit)
    return complaints


def told_until(end: float | None, report: Report) -> dict[str, np.ndarray]:
    return {
        name: value
        for name, value in report.told.items()
        if end is None or report.told_at.get(name, 0) < end
    }


def of_values(
    told: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> Iterator[str]:
    for name, value in told.items():
        try:
            assert_same_outcome({name: expected[name]}, {name: value})
        except (AssertionError, KeyError) as error:
            text = " ".join(str(error).split())
            yield f"{name} is not that of one device: {text}"


def of_error(
    who: str, report: Report, since: float, limit: float
) -> Iterator[str]:
    assert report.error is not None
    seconds = report.error["at"] - since
    if not report.error["ours"]:
        yield f"{who} has raised {report.error}"
    if seconds > limit:
        yield f"{who} has raised an error after {seconds:.1f} s"
    if report.gone_at is None:
        yield f"{who} has raised an error and lives on"
    elif report.gone_at - report.error["at"] > limit:
        late = report.gone_at - report.error["at"]
        yield f"{who} has ended {late:.1f} s after its error"


@contextlib.contextmanager
def cable(draw: Draw, addresses: list[str]) -> Iterator[tuple[Any, int]]:
    """Lays a cable between the wrong process and the others.

    Yields:
        The addresses as each process sees them, and what is to be stopped.
    """
    if draw.fault != "cut off":
        yield [addresses] * draw.processes, 0
        return
    seen = [list(addresses) for _ in addresses]
    pairs = []
    for index in set(range(draw.processes)) - {draw.wrong}:
        for here, there in ((index, draw.wrong), (draw.wrong, index)):
            (seen[here][there],) = free_addresses(1)
            ends = (seen[here][there], addresses[there])
            pairs.append(":".join(each.partition(":")[2] for each in ends))
    with subprocess.Popen(
        [sys.executable, str(HERE / "process_cable.py"), *pairs],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield seen, process.pid
        finally:
            process.kill()


def run_fault(draw: Draw, directory: pathlib.Path, limit: float) -> list[str]:
    addresses = free_addresses(draw.processes)
    with cable(draw, addresses) as (seen, pid), contextlib.ExitStack() as files:
        started = []
        for index in range(draw.processes):
            output = files.enter_context((directory / f"{index}.log").open("w"))
            started.append(
                subprocess.Popen(
                    list(program(draw, directory)),
                    env=os.environ
                    | {
                        "TF_CONFIG": tf_config(seen[index], index),
                        "CONFLUX_TEST_CABLE": str(pid),
                        "CONFLUX_STEP_TIMEOUT": str(draw.patience or 1800),
                    },
                    stdout=output,
                    stderr=output,
                )
            )
        try:
            gone = waited_for(started, draw, directory, limit)
        finally:
            for each in started:
                each.kill()
                each.wait()
    reports = [
        read(directory / f"{index}-0.jsonl") for index in range(draw.processes)
    ]
    for report, at in zip(reports, gone, strict=True):
        report.gone_at = at
    return judged(draw, reports, expected_of(draw), limit)


def program(draw: Draw, directory: pathlib.Path) -> Iterator[str]:
    yield sys.executable
    yield str(HERE / "process_lot.py")
    yield json.dumps(dataclasses.asdict(draw))
    yield str(directory)


def waited_for(
    started: list[Any], draw: Draw, directory: pathlib.Path, limit: float
) -> list[float | None]:
    """Returns when each process has ended, `None` if it has not in time."""
    gone: list[float | None] = [None] * len(started)
    end = time.monotonic() + SECONDS_OF_RUN
    has_happened = False
    while None in gone and time.monotonic() < end:
        time.sleep(0.1)
        for index, each in enumerate(started):
            if gone[index] is None and each.poll() is not None:
                gone[index] = time.monotonic()
        fault = read(directory / f"{draw.wrong}-0.jsonl").fault_at
        if fault and not has_happened and draw.fault != "sleeps":
            has_happened, end = True, fault + draw.patience + 2 * limit
        others = [at for i, at in enumerate(gone) if i != draw.wrong]
        if draw.stays and has_happened and None not in others:
            break
    return gone


def run_restart(draw: Draw, directory: pathlib.Path, limit: float) -> list[str]:
    """Kills a process, and compares what the next attempt ends with."""
    run = ["-m", "keras_conflux", "run", "--restarts", "1", "--grace", "5"]
    _, *script = program(draw, directory)
    with (directory / "run.log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *run, "--processes", str(draw.processes), *script],
            stdout=output,
            stderr=output,
        )
        try:
            status = process.wait(2 * SECONDS_OF_RUN)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            return ["the launcher has not ended"]
    reports = [
        [read(directory / f"{i}-{attempt}.jsonl") for attempt in (0, 1)]
        for i in range(draw.processes)
    ]
    expected = expected_of(draw)
    last = int(reports[draw.wrong][0].fault_at is not None)
    complaints = [f"the launcher has returned {status}"] if status else []
    for index, attempts in enumerate(reports):
        for report in attempts:
            complaints += of_values(report.told, expected)
        told = attempts[last].told
        ends = {name for name in expected if name.startswith("variable")}
        if not attempts[last].ended or not ends <= told.keys():
            complaints.append(f"process {index} has not ended well")
    return complaints


def run(seed: int, number: int, options: argparse.Namespace) -> bool:
    """Returns whether a run is right, and prints it."""
    draw = drawn(seed, number, options.restarts)
    began = time.monotonic()
    judge: Callable[..., list[str]]
    judge = run_restart if options.restarts else run_fault
    with tempfile.TemporaryDirectory(prefix="lot-") as name:
        directory = pathlib.Path(name)
        complaints = judge(draw, directory, options.limit)
        logs = [path.read_text()[-3000:] for path in directory.glob("*.log")]
    seconds = time.monotonic() - began
    shown = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(draw).items())
    print(
        f"run {number} of seed {seed}, {seconds:.0f} s: "
        f"{'WRONG' if complaints else 'right'}. {shown}",
        flush=True,
    )
    for complaint in complaints[:10]:
        print("   ", complaint, flush=True)
    if complaints and options.only:
        print(*logs, sep="\n---\n")
    return not complaints


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of runs")
    parser.add_argument("--restarts", action="store_true")
    parser.add_argument(
        "--limit",
        type=float,
        default=30,
        help="within how many seconds an error comes, and a process ends",
    )
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # of the processes, too
    numbers = options.only or range(options.runs)
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        right = list(pool.map(lambda n: run(options.seed, n, options), numbers))
    print(f"{sum(right)} of {len(right)} runs are right.")
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
