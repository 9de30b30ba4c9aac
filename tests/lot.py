"""Trainings of several processes with a fault drawn by lot, many of them.

    python tests/lot.py --runs 200 --seed 1 --at-once 12
    python tests/lot.py --runs 50 --seed 1 --at-once 12 --restarts
    python tests/lot.py --first 40 --runs 20 --seed 1 --at-once 12
    python tests/lot.py --only 17 --seed 1

In each run, a process does something wrong at some moment. All others have to
end with an error, in time, and whatever any of them has computed before has to
be what one device computes. The processes are started one by one, or by
`keras-conflux run`, with an output of some kind. Then whoever reads it has to
get all of it, and the last line has to name the process that was wrong.

With `--restarts`, the process is killed, and the launcher starts all of them
again; or a user ends all, as by Ctrl-C or by closing the terminal, and starts
them again. No save may be cut short, and they must end as one device does.

A failure is printed with what was drawn, and with what repeats it. The last
line counts all of them, as JSON.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import re
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
from outputs import CLOSING
from outputs import KINDS
from outputs import LIVING
from outputs import Launched
from outputs import launched

import keras_conflux as kc

HERE = pathlib.Path(__file__).parent
HEARTBEAT = 5
STEP_TIMEOUT = 60
STEPS = 5
"""Of an epoch, which are the batches of the second process."""
LOSS = r"loss at batch (\d+) of epoch (\d+) of fit (\d)"
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
    "a branch of its own": OUT_OF_STEPS,
    "a step of its own": OUT_OF_STEPS,
    "nothing": ("start",),
    "learning rate by one process": ("train batch", "epoch end"),
    "set_weights by one process": ("train batch", "epoch end"),
}
HARMLESS = ("sleeps", "nothing")
FAILING = (
    *("killed", "stopped", "leaves", "interrupted", "raises", "exits"),
    "fails in the graph",
)
"""Whoever does it is named by the last line of the launcher. One that is stuck
lives, and those that wait for it fail."""
BY_USER = {
    "Ctrl-C": KINDS,
    "SIGTERM": KINDS,
    "closing": CLOSING,
}
"""What ends all processes, and with which outputs."""
LEFTOVERS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "192.0.2.1:1,192.0.2.2:2",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "0",
    "TF_CONFIG": tf_config(["192.0.2.1:1", "192.0.2.2:2"], 1),
    "SLURM_STEP_NODELIST": "nowhere",
    "SLURM_PROCID": "7",
    "OMPI_COMM_WORLD_RANK": "3",
    "RANK": "1",
    "MASTER_PORT": "1",
    "CONFLUX_TOKEN": "of another training",
    "CONFLUX_ATTEMPT": "7",
}
"""Variables of launchers that have gone."""
OF_STATE = (
    "a branch of its own",
    "learning rate by one process",
    "set_weights by one process",
)
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
    output: str | None = None
    """Of what kind that of the launcher is, if one starts the processes."""
    pause: float = 0.0
    """For how many seconds whoever reads it waits before he reads on."""
    leftovers: tuple[str, ...] = ()
    """Which variables of other launchers the launcher finds."""
    ignores: bool = False
    """Whether the process that is wrong ignores signals that end it."""
    strangers: bool = False
    """Whether strangers call where the processes meet."""

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
    fault = choose.choice(list(PLACES))
    if restarts:
        fault = choose.choice(["killed", "killed", *BY_USER])
    place = choose.choice(PLACES.get(fault, ANYWHERE))
    processes = choose.choice([2, 3])
    visit: float = choose.randrange(VISITS.get(place, 1))
    if place == "any time":
        visit = round(choose.uniform(0, SECONDS_OF_TRAINING), 2)
    resumes_with = choose.choice(["BackupAndRestore", "Resume"])
    if place == "saving" or (fault in BY_USER and place != "between fits"):
        # What Keras' callback has half written, it cannot read. A user's end
        # comes a moment after the place, as while it writes.
        resumes_with = "Resume"
    data = choose.choice(["global", "local"])
    # `Resume` refuses parts of one's own.
    is_common = (
        resumes_with == "Resume" if restarts else fault in OF_COMMON_DATA
    )
    output: str | None = choose.choice(list(BY_USER.get(fault, LIVING)))
    if fault == "cut off" or (not restarts and choose.random() < 0.3):
        output = None
    leftovers = choose.sample(sorted(LEFTOVERS), choose.randrange(4))
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
        output=output,
        pause=choose.choice([0.0, 0.0, 3.0]) if output else 0.0,
        leftovers=tuple(leftovers) if output else (),
        ignores=fault != "interrupted" and choose.random() < 0.25,
        strangers=fault != "cut off" and choose.random() < 0.25,
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
    pid: int | None = None
    lines: int = 0


def read(path: pathlib.Path) -> Report:
    report = Report()
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    report.lines = len(lines)
    for line in map(json.loads, lines):
        if "name" in line:
            report.told[line["name"]] = np.asarray(line["value"])
            report.told_at[line["name"]] = line["at"]
        elif "fault" in line:
            report.fault_at = line["at"]
        elif "error" in line:
            report.error = line
        elif "pid" in line:
            report.pid = line["pid"]
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
    is_harmless = draw.fault in HARMLESS or fault_at is None
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
    start = run_one_by_one if draw.output is None else run_launched
    gone, complaints = start(draw, directory, limit)
    reports = [
        read(directory / f"{index}-0.jsonl") for index in range(draw.processes)
    ]
    for report, at in zip(reports, gone, strict=True):
        report.gone_at = at
    return complaints + judged(draw, reports, expected_of(draw), limit)


def environ_of(draw: Draw, **more: str) -> dict[str, str]:
    leftovers = {name: LEFTOVERS[name] for name in draw.leftovers}
    timeout = {"CONFLUX_STEP_TIMEOUT": str(draw.patience or 1800)}
    return {**os.environ, **leftovers, **timeout, **more}


def run_one_by_one(
    draw: Draw, directory: pathlib.Path, limit: float
) -> tuple[list[float | None], list[str]]:
    addresses = free_addresses(draw.processes)
    with cable(draw, addresses) as (seen, pid), contextlib.ExitStack() as files:
        started = []
        for index in range(draw.processes):
            output = files.enter_context((directory / f"{index}.log").open("w"))
            started.append(
                subprocess.Popen(
                    [sys.executable, *program(draw, directory)],
                    env=environ_of(
                        draw,
                        TF_CONFIG=tf_config(seen[index], index),
                        CONFLUX_TEST_CABLE=str(pid),
                    ),
                    stdout=output,
                    stderr=output,
                )
            )
        try:
            polls = [functools.partial(has_ended, each) for each in started]
            return waited_for(polls, draw, directory, limit), []
        finally:
            for each in started:
                each.kill()
                each.wait()


def has_ended(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is not None


def run_launched(
    draw: Draw, directory: pathlib.Path, limit: float
) -> tuple[list[float | None], list[str]]:
    """Lets the launcher start the processes, and judges what it prints."""
    files = [directory / f"{i}-0.jsonl" for i in range(draw.processes)]
    with launch(draw, directory, 0, "--grace", str(limit)) as launcher:

        def is_gone(file: pathlib.Path) -> bool:
            return has_ended(launcher.process) or is_no_process(file)

        polls = [functools.partial(is_gone, file) for file in files]
        gone = waited_for(polls, draw, directory, limit)
        try:
            status = launcher.process.wait(3 * limit)
        except subprocess.TimeoutExpired:
            return gone, ["the launcher has not ended"]
        reports = [read(file) for file in files]
        complaints = list(of_output(launcher.output(), [reports]))
        last = launcher.last_line()
    if not (status or all(report.ended for report in reports)):
        complaints.append(f"the launcher has returned {status}")
    if status:
        has_happened = reports[draw.wrong].fault_at is not None
        complaints += of_last_line(draw, last, has_happened)
    return gone, complaints


def of_last_line(
    draw: Draw, last: str | None, has_happened: bool
) -> Iterator[str]:
    """Yields what is wrong with the line by which the launcher ends."""
    names = draw.fault in FAILING and has_happened
    expected = f"process {draw.wrong}" if names else "process"
    if not re.match(rf"keras-conflux run: .*{expected}\b", last or ""):
        yield f"the last line is {last!r}"


def launch(
    draw: Draw, directory: pathlib.Path, start: int, *options: str
) -> contextlib.AbstractContextManager[Launched]:
    assert draw.output is not None
    return launched(
        draw.output,
        [
            *options,
            *("--processes", str(draw.processes)),
            *program(draw, directory, start),
        ],
        directory / f"start-{start}",
        draw.pause,
        environ_of(draw),
    )


def is_no_process(file: pathlib.Path) -> bool:
    """Returns whether a process has ended that has told its number."""
    pid = read(file).pid
    if pid is None:
        return False
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def of_output(
    output: str | None, starts: list[list[Report]], first: int = 0
) -> Iterator[str]:
    """Yields what somebody who has read all has not got."""
    if output is None:
        return
    for attempt, reports in enumerate(starts, first):
        for index, report in enumerate(reports):
            line = rf"\[{index}\] line {attempt} (\d+)\n"
            got = sorted(map(int, re.findall(line, output)))
            # One that was killed may have been about to print the last one.
            if len(got) < report.lines - 1 or got != list(range(len(got))):
                yield (
                    f"of {report.lines} lines of process {index} in start "
                    f"{attempt}, these are there: {got}"
                )


def program(
    draw: Draw, directory: pathlib.Path, start: int = 0
) -> Iterator[str]:
    yield str(HERE / "process_lot.py")
    yield json.dumps(dataclasses.asdict(draw))
    yield str(directory)
    yield str(start)


def waited_for(
    polls: list[Callable[[], Any]],
    draw: Draw,
    directory: pathlib.Path,
    limit: float,
) -> list[float | None]:
    """Returns when each process has ended, `None` if it has not in time."""
    gone: list[float | None] = [None] * len(polls)
    end = time.monotonic() + SECONDS_OF_RUN
    has_happened = False
    while None in gone and time.monotonic() < end:
        time.sleep(0.1)
        for index, has_ended in enumerate(polls):
            if gone[index] is None and has_ended():
                gone[index] = time.monotonic()
        fault = read(directory / f"{draw.wrong}-0.jsonl").fault_at
        if fault and not has_happened and draw.fault not in HARMLESS:
            has_happened, end = True, fault + draw.patience + 2 * limit
        others = [at for i, at in enumerate(gone) if i != draw.wrong]
        if draw.stays and has_happened and None not in others:
            break
    return gone


def run_restart(draw: Draw, directory: pathlib.Path, limit: float) -> list[str]:
    """Ends all processes once, and compares what they end with afterwards."""
    complaints: list[str] = []
    grace = ["--grace", str(limit)]
    if draw.fault in BY_USER:
        complaints += ended_by_user(draw, directory, grace)
        draw = dataclasses.replace(draw, output="Pipe")
        options = grace
    else:
        options = [*grace, "--restarts", "1"]
    fault_at = read(directory / f"{draw.wrong}-0.jsonl").fault_at
    first = int(draw.fault in BY_USER)
    with launch(draw, directory, first, *options) as launcher:
        try:
            status = launcher.process.wait(2 * SECONDS_OF_RUN)
        except subprocess.TimeoutExpired:
            return [*complaints, "the launcher has not ended"]
        output = launcher.output()
    attempts = attempts_in(draw, directory)
    if status:
        complaints.append(f"the launcher has returned {status}")
    complaints += of_output(output, attempts[first:], first)
    if not first:
        fault_at = attempts[0][draw.wrong].fault_at
    expected = expected_of(draw)
    ends = {name for name in expected if name.startswith("variable")}
    for index in range(draw.processes):
        for each in attempts:
            complaints += of_values(each[index].told, expected)
        last = attempts[int(bool(first or fault_at))][index]
        if not last.ended or not ends <= last.told.keys():
            complaints.append(f"process {index} has not ended well")
    return complaints


def attempts_in(draw: Draw, directory: pathlib.Path) -> list[list[Report]]:
    """Returns the reports of both attempts."""
    return [
        [read(directory / f"{i}-{at}.jsonl") for i in range(draw.processes)]
        for at in (0, 1)
    ]


def ended_by_user(
    draw: Draw, directory: pathlib.Path, options: list[str]
) -> list[str]:
    """Lets a user end all processes, and judges what they leave."""
    file = directory / f"{draw.wrong}-0.jsonl"
    ended_at = math.inf
    with launch(draw, directory, 0, *options) as launcher:
        end = time.monotonic() + SECONDS_OF_RUN
        while launcher.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            if ended_at == math.inf and read(file).fault_at:
                ended_at = time.monotonic()
                launcher.end(draw.fault)
        status = launcher.process.poll()
        if status is None:
            return ["the launcher has not ended"]
        reports, _ = attempts_in(draw, directory)
        complaints = list(of_output(launcher.output(), [reports]))
    if status == 128 + signal.SIGKILL:
        complaints.append("a process was killed")
    if not (status or all(report.ended for report in reports)):
        complaints.append(f"the launcher has returned {status}")
    if draw.resumes_with == "Resume":
        complaints += of_checkpoints(draw, directory, reports[0], ended_at)
    return complaints


def of_checkpoints(
    draw: Draw, directory: pathlib.Path, report: Report, ended_at: float
) -> Iterator[str]:
    """Yields what is wrong with the checkpoints that a signal leaves."""
    found = {}
    for path in directory.glob("fit-*"):
        for checkpoint in kc.checkpoints(path):
            if checkpoint.damage:
                yield f"{checkpoint} is damaged"
        steps = [int(each.name.split("-")[1]) for each in path.glob("step*")]
        found[path.name] = max(steps, default=0)
    if draw.fault == "Ctrl-C":
        return  # which Python raises in the middle of a step
    for name, at in report.told_at.items():
        told = re.fullmatch(LOSS, name)
        if told and at < ended_at:
            steps = int(told[2]) * STEPS + int(told[1]) + 1
            saved = found.get(f"fit-{told[3]}", 0)
            if saved < steps:
                yield f"{steps} steps were done, and saved are {saved}"


def run(
    seed: int, number: int, options: argparse.Namespace
) -> tuple[Draw, bool]:
    """Returns what was drawn and whether it went right, and prints it."""
    draw = drawn(seed, number, options.restarts)
    began = time.monotonic()
    judge: Callable[..., list[str]]
    judge = run_restart if options.restarts else run_fault
    with tempfile.TemporaryDirectory(prefix="lot-") as name:
        directory = pathlib.Path(name)
        complaints = judge(draw, directory, options.limit)
        logs = [path.read_text()[-3000:] for path in directory.rglob("*.log")]
    seconds = time.monotonic() - began
    shown = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(draw).items())
    print(
        f"run {number} of seed {seed}, {seconds:.0f} s: "
        f"{'WRONG' if complaints else 'right'}. {shown}",
        flush=True,
    )
    for complaint in complaints[:10]:
        print("   ", complaint, flush=True)
    if complaints:
        more = " --restarts" * options.restarts
        print(f"    python tests/lot.py --seed {seed} --only {number}{more}")
    if complaints and options.only:
        print(*logs, sep="\n---\n")
    return draw, not complaints


def summary(done: list[tuple[Draw, bool]]) -> str:
    """Returns counts of right and wrong runs, as a line of JSON."""
    counts: dict[str, Any] = {"runs": len(done)}
    counts["right"] = sum(right for _, right in done)
    for name in ("fault", "output", "processes", "strangers", "ignores"):
        found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        for draw, right in done:
            found[str(getattr(draw, name))][not right] += 1
        counts[name] = dict(sorted(found.items()))
    return json.dumps(counts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of a run")
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
    numbers = range(options.first, options.first + options.runs)
    numbers = options.only or numbers
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        done = list(pool.map(lambda n: run(options.seed, n, options), numbers))
    print(summary(done))
    return int(not all(right for _, right in done))


if __name__ == "__main__":
    sys.exit(main())
