"""Kills trainings by lot, starts them again, and judges what they leave.

    python tests/kills.py --seed 1 --count 200 --at-once 12
    python tests/kills.py --sweep --at-once 12
    python tests/kills.py --seed 1 --only 17 --keep /tmp/kept

Each case is a training that is ended several times, by `kill -9` or by
`SIGTERM`, and then runs to its end. In one process and on the same devices it
leaves what a training without `kc.Resume` leaves, bit by bit; elsewhere what
one device leaves, to rounding. Where processes draw parts of their own, it is
what so many processes leave.

Some attempts are started by `keras-conflux run`, with an output of some kind.
It is told to end, too, or nobody reads its output any more. No save may be cut
short then, whoever reads has to get all, and the last line has to name the
process that was killed.

Each case prints a line when it has ended. A failure prints what is wrong and
the command that repeats it. The last line counts all, as JSON.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np
from addresses import free_addresses
from killed_training import CALLBACKS
from killed_training import FAULTS
from killed_training import MOMENTS
from killed_training import Attempt
from killed_training import End
from killed_training import Training
from killed_training import run
from outputs import CLOSING
from outputs import LIVING
from outputs import Launched
from outputs import launched
from resume_cases import DATA
from resume_cases import STEPS

LIMIT = 240
"""After so many seconds an attempt hangs."""
TOLERANCE = 1e-5
"""Relative to the largest entry of a tensor."""
SMALL = 0.1
"""As large counts what is smaller. What accumulates gradients is as large as
they were before they cancelled out, which is 1."""
ALONE = [(1, 0), (1, 1), (1, 2), (1, 3)]
TOGETHER = [(2, 1), (2, 2), (3, 1)]
BELOW = {
    "on_train_batch_begin": 8,
    "on_train_batch_end": 8,
    "on_train_begin": 1,
    "on_train_end": 1,
    "files": 100,
    "seconds": 3,
}
"""Below what the count of a moment is drawn, if not below 2."""
OF_UNKNOWN_LENGTH = "tf.data, of unknown length"


@dataclasses.dataclass(frozen=True)
class Case:
    """A training and how it is interrupted."""

    name: str
    training: Training
    attempts: tuple[Attempt, ...]
    """The last one has no end."""

    @property
    def is_exact(self) -> bool:
        """Whether it leaves the same bits as one that is not interrupted."""
        layouts = {(each.processes, each.devices) for each in self.attempts}
        return len(layouts) == 1 and next(iter(layouts))[0] == 1


def drawn(seed: int, number: int) -> Case:
    """Draws a case."""
    draw = random.Random(f"{seed} {number}")
    one = draw.random() < 0.5
    data = draw.choice(sorted(DATA))
    layouts = [draw.choice(ALONE)] if one else [*ALONE, *TOGETHER]
    if not one and data == OF_UNKNOWN_LENGTH:
        # Without replicas, Keras counts one step more in each of its epochs.
        layouts.remove((1, 0))
    parts = not one and draw.random() < 0.3
    if parts:
        layouts = [draw.choice(TOGETHER)]
    attempts = []
    for _ in range(draw.randint(1, 4)):
        processes, devices = draw.choice(layouts)
        moment = draw.choice(MOMENTS)
        below = BELOW.get(moment, 2)
        count = draw.randrange(below)
        if moment == "seconds":
            count = draw.uniform(0, below)
        number_of_signal = draw.choice([9, 9, signal.SIGTERM])
        who = draw.randrange(processes)
        output = draw.choice([None, None, None, None, *LIVING, *CLOSING])
        if output in CLOSING or (output and draw.random() < 0.3):
            number_of_signal = 0
        end = End(int(number_of_signal), moment, count, who)
        attempts.append(Attempt(processes, devices, end, output))
    attempts.append(Attempt(*draw.choice(layouts)))
    names = sorted(CALLBACKS)
    training = Training(
        data=data,
        epochs=draw.randint(1, 4),
        every=draw.choice([1, 1, 2, 3, 5, "0.02s", "10m"]),
        accumulation=draw.randint(1, 3),
        steps_per_execution=draw.choice([1, 1, 2]),
        dropout=one,
        validation=draw.random() < 0.5,
        callbacks=tuple(draw.sample(names, draw.randint(0, len(names)))),
        parts=parts,
    )
    return Case(f"--seed {seed} --only {number}", training, tuple(attempts))


def swept() -> Iterator[Case]:
    """Ends a small training at each step and each file operation."""
    training = Training(
        data="PyDataset",
        epochs=2,
        every=2,
        accumulation=2,
        steps_per_execution=1,
        dropout=True,
        validation=True,
        callbacks=("own", "csv", "best"),
    )
    counts = {
        "on_train_batch_begin": range(2 * STEPS),
        "on_train_batch_end": range(2 * STEPS),
        "files": range(130),
    }
    phases = {
        moment: range(2)
        for moment in MOMENTS
        if moment not in (*counts, "seconds")
    }
    number = itertools.count()
    for kind in (signal.SIGKILL, signal.SIGTERM):
        for moment, each in (counts | phases).items():
            for count in each:
                end = End(int(kind), moment, count)
                attempts = (Attempt(1, 0, end), Attempt(1, 0))
                name = f"--sweep --only {next(number)}"
                yield Case(name, training, attempts)


class Failure(Exception):
    """What is wrong with a case."""


class Judge:
    """Runs cases and compares what they leave.

    Args:
        folder: Where the trainings write.
        fault: What of the package is switched off, one of `FAULTS`.
    """

    def __init__(self, folder: pathlib.Path, fault: str | None = None) -> None:
        self._folder = folder
        self._fault = fault
        # A server does not look for what it preloads where this process would.
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["killed_training"])
        self.ends: collections.Counter[str] = collections.Counter()
        """How attempts have ended."""
        self._lock = threading.Lock()
        self._plain: dict[
            tuple[Training, Attempt], concurrent.futures.Future
        ] = {}

    def failure(self, case: Case) -> str | None:
        """Returns what is wrong with a case, `None` if nothing is."""
        folder = self._folder / case.name.replace(" ", "").strip("-")
        folder.mkdir()
        try:
            self._judge(case, folder)
        except Failure as failure:
            return f"{failure}\n    {case}\n    in {folder}"
        shutil.rmtree(folder)
        return None

    def _judge(self, case: Case, folder: pathlib.Path) -> None:
        killed = folder / "killed"
        killed.mkdir()
        for number, attempt in enumerate(case.attempts):
            if attempt.output is None:
                self._run(case.training, attempt, killed, number, True)
            else:
                self._launch(case.training, attempt, killed, number)
        *_, last = case.attempts
        layout = Attempt(1, last.devices if case.is_exact else 1)
        if case.training.parts:
            layout = last
        compare(
            dict(np.load(killed / "result.npz")),
            self._expected(case.training, layout),
            case.is_exact,
        )

    def _expected(
        self, training: Training, layout: Attempt
    ) -> dict[str, np.ndarray]:
        """Returns what a training leaves that is not interrupted."""
        key = training, layout
        with self._lock:
            first = key not in self._plain
            plain = self._plain.setdefault(key, concurrent.futures.Future())
        if first:
            try:
                plain.set_result(self._trained_without_end(training, layout))
            except BaseException as error:
                plain.set_exception(error)
        return plain.result()

    def _trained_without_end(
        self, training: Training, layout: Attempt
    ) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = pathlib.Path(name)
            self._run(training, layout, folder, 0, False)
            return dict(np.load(folder / "result.npz"))

    def _run(
        self,
        training: Training,
        attempt: Attempt,
        folder: pathlib.Path,
        number: int,
        resume: bool,
    ) -> None:
        addresses = free_addresses(attempt.processes)
        logs = [folder / f"{number}-{i}.log" for i in range(attempt.processes)]
        started = [
            self._processes.Process(
                target=run,
                args=(
                    training,
                    attempt,
                    folder,
                    logs[index],
                    addresses,
                    index,
                    self._fault,
                    resume,
                ),
            )
            for index in range(attempt.processes)
        ]
        for process in started:
            process.start()
        until = time.monotonic() + LIMIT
        for process in started:
            process.join(max(0, until - time.monotonic()))
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
        _judge_codes(attempt, codes, logs)
        if resume:
            self._judge_steps(attempt, codes, folder)

    def _launch(
        self,
        training: Training,
        attempt: Attempt,
        folder: pathlib.Path,
        number: int,
    ) -> None:
        """Lets the launcher start the processes, and judges what it prints."""
        given = folder / f"{number}.pickle"
        told = training, attempt, folder, None, None, None, self._fault, True
        given.write_bytes(pickle.dumps(told))
        script = str(pathlib.Path(__file__).with_name("killed_training.py"))
        assert attempt.output is not None
        with launched(
            attempt.output,
            ["--processes", str(attempt.processes), script, str(given)],
            folder / f"{number}",
        ) as launcher:
            _end_when_told(launcher, attempt, folder)
            code = launcher.process.wait()
            _judge_output(launcher, attempt, code)
        self._judge_steps(attempt, [code] * attempt.processes, folder)

    def _judge_steps(
        self, attempt: Attempt, codes: list[int | None], folder: pathlib.Path
    ) -> None:
        """Sees to it that a signal that can be obeyed loses no step."""
        end = attempt.end
        if end is None:
            return
        code = codes[end.process]
        name = signal.Signals(end.signal).name if end.signal else "the user"
        by = attempt.output or "one by one"
        self.ends[f"{name}, {by}: {code}"] += 1
        if end.signal == signal.SIGKILL:
            return
        if code != 128 + (end.signal or signal.SIGTERM):
            return
        done = int((folder / f"signalled-{end.process}").read_text())
        saved = [int(x.name.split("-")[1]) for x in folder.glob("resume/step*")]
        # The launcher does not say whether the signal could be obeyed.
        if max(saved, default=0 if attempt.output else -1) < done:
            raise Failure(f"{done} steps were done, and saved are {saved}")


def _end_when_told(
    launcher: Launched, attempt: Attempt, folder: pathlib.Path
) -> None:
    """Waits for the launcher, and ends it if that is what is to happen."""
    end = attempt.end
    assert end is not None
    told = folder / f"signalled-{end.process}"
    told.unlink(missing_ok=True)
    until = time.monotonic() + LIMIT
    is_told = end.signal != 0
    while launcher.process.poll() is None:
        time.sleep(0.02)
        if time.monotonic() > until:
            raise Failure(f"{attempt} hangs")
        if not is_told and told.exists() and told.stat().st_size > 0:
            is_told = True
            launcher.end("closing" if attempt.output in CLOSING else "SIGTERM")


def _judge_output(launcher: Launched, attempt: Attempt, code: int) -> None:
    """Sees to it that the launcher has ended as it should, and said all."""
    end = attempt.end
    assert end is not None
    last, output = launcher.last_line(), launcher.output()
    text = f"{attempt} has ended with {code}: {last!r}\n{output}"
    if code not in {0, 128 + (end.signal or signal.SIGTERM)}:
        raise Failure(text)
    for index in range(attempt.processes if output is not None else 0):
        said = re.findall(rf"\[{index}\] (step \d+|done)\n", output or "")
        steps = [int(each.split()[1]) for each in said if each != "done"]
        widths = {after - before for before, after in itertools.pairwise(steps)}
        if len(widths) > 1 or (code == 0 and said[-1:] != ["done"]):
            raise Failure(f"lines are missing: {text}")
    who = f"keras-conflux run: process {end.process} ended with"
    if code == 128 + signal.SIGKILL and not (last or "").startswith(who):
        raise Failure(f"the last line is wrong: {text}")


def _judge_codes(
    attempt: Attempt, codes: list[int | None], logs: list[pathlib.Path]
) -> None:
    """Sees to it that each process has ended as it should."""
    end = attempt.end
    said = [log.read_text().split() for log in logs if log.exists()]
    texts = "\n".join(" ".join(words)[-500:] for words in said)
    if None in codes:
        raise Failure(f"{attempt} hangs: {codes}\n{texts}")
    if set(codes) == {0}:
        return  # the moment has not come, or after the end
    if end is None:
        raise Failure(f"{attempt} has ended with {codes}\n{texts}")
    # What receives no signal itself ends with another, or with an error.
    expected = {-end.signal, 128 + end.signal} - {128 + signal.SIGKILL}
    together = set(codes) == {128 + signal.SIGTERM}
    if end.signal == signal.SIGTERM and together:
        return
    if codes[end.process] not in expected:
        raise Failure(f"{attempt} has ended with {codes}\n{texts}")


def compare(
    got: dict[str, np.ndarray], expected: dict[str, np.ndarray], exact: bool
) -> None:
    """Raises `Failure` if something is not as it would have been."""
    if got.keys() != expected.keys():
        raise Failure(f"{sorted(got)} is there instead of {sorted(expected)}")
    for name, value in expected.items():
        found = got[name]
        if found.shape != value.shape:
            raise Failure(f"{name} has {found.shape} instead of {value.shape}")
        if exact and found.tobytes() == value.tobytes():
            continue
        least = 1.0 if "accumulator" in name else SMALL
        atol = TOLERANCE * max(least, np.nanmax(np.abs(value), initial=0))
        if exact or not np.allclose(found, value, 0, atol, equal_nan=True):
            gap = np.max(np.abs(np.float64(found) - np.float64(value)))
            raise Failure(f"{name} differs by {gap:.1e}: {found}, {value}")


def main() -> int:
    """Runs the cases that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of a case")
    parser.add_argument("--sweep", action="store_true", help="instead of draws")
    parser.add_argument("--only", type=int, metavar="NUMBER")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", type=pathlib.Path, help="what failures leave")
    parser.add_argument("--fault", choices=sorted(FAULTS))
    parser.add_argument(
        "--url", action="store_true", help="checkpoints are named by a URL"
    )
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # of the processes, too
    if options.url:
        os.environ["KILLS_BY_URL"] = "1"
    if options.sweep:
        cases = list(swept())
    else:
        numbers = range(options.first, options.first + options.count)
        if options.only is not None:
            numbers = [options.only]
        cases = [drawn(options.seed, number) for number in numbers]
    if options.sweep and options.only is not None:
        cases = [cases[options.only]]
    folder = options.keep or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    judge, failures = Judge(folder, options.fault), list[str]()

    def run_case(case: Case) -> None:
        began = time.monotonic()
        found = judge.failure(case)
        seconds = time.monotonic() - began
        if found is not None:
            failures.append(case.name)
        print(f"{case.name}, {seconds:.0f} s: {found or 'right'}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run_case, cases))
    ends = dict(sorted(judge.ends.items()))
    counts = {"cases": len(cases), "failures": failures, "ends": ends}
    print(json.dumps(counts))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
