"""Judges many drawn programs in processes that are started anew if they fail.

Each process is asked for one program after the other, by its number.
"""

import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading

FAULTS = ("WRONG", "FALSE ALARM", "crash", "died")
"""The verdicts that no program is to get."""
SECONDS = 180
"""How long a program may take."""
PROGRAMS = 50
"""How many a process judges before it makes place for another one: Keras and
TensorFlow keep graphs of models that are gone."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """What has been found of one program."""

    number: int
    verdict: str
    kind: str = "?"
    text: str = ""
    said: str = ""
    redrawn: tuple = ()

    def __str__(self):
        """What to read of a program."""
        return f"{self.number}: {self.verdict}: {self.said}\n{self.text}"


class Worker:
    """A process that judges programs, one at a time."""

    def __init__(self):
        self._process = None
        self._left = 0

    def judged(self, number):
        """Returns what is found of the program of a number."""
        if not self._left:
            self._start()
        self._left -= 1
        timer = threading.Timer(SECONDS, self._process.kill)
        timer.start()
        try:
            print(number, file=self._process.stdin, flush=True)
            for line in self._process.stdout:
                if line.startswith("judged: "):
                    found = json.loads(line.removeprefix("judged: "))
                    return Judged(**found)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        self._left = 0
        return Judged(number, "died", said=f"code {self._process.wait()}")

    def _start(self):
        self.end()
        self._left = PROGRAMS
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def end(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def judge_all(numbers, count, tell):
    """Judges programs in several processes.

    Args:
        numbers: Those of the programs.
        count: How many processes there are.
        tell: Called with each `Judged`.
    """
    waiting = queue.SimpleQueue()
    for number in numbers:
        waiting.put(number)

    def work():
        worker = Worker()
        try:
            while True:
                tell(worker.judged(waiting.get_nowait()))
        except queue.Empty:
            worker.end()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for each in [pool.submit(work) for _ in range(count)]:
            each.result()


def table(found):
    """Returns counts of verdicts by the kind of place, as text."""
    counts = collections.Counter((each.kind, each.verdict) for each in found)
    verdicts = sorted({each.verdict for each in found})
    rows = [["", *verdicts]]
    for kind in [*sorted({each.kind for each in found}), "all"]:
        rows.append([kind])
        for verdict in verdicts:
            rows[-1].append(
                sum(
                    count
                    for (place, which), count in counts.items()
                    if which == verdict and kind in (place, "all")
                )
            )
    return "\n".join("".join(f"{each!s:>18}" for each in row) for row in rows)


def report(found):
    """Returns what to read of all programs, as text."""
    redrawn = collections.Counter(why for each in found for why in each.redrawn)
    warned = collections.Counter(
        each.said.partition(":")[2][:70]
        for each in found
        if each.verdict == "warned"
    )
    return "\n".join(
        [
            table(found),
            "drawn again: " + ", ".join(f"{k} {v}" for k, v in redrawn.items()),
            *(f"{count} warned: {said}" for said, count in warned.items()),
        ]
    )


def serve():
    """Judges the programs whose numbers come as lines of the input."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    import tensorflow as tf

    import keras_conflux as kc

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    kc.devices(3)
    keras.config.set_floatx("float64")
    import drawn_trainings

    for line in sys.stdin:
        judged = drawn_trainings.verdict_of(int(line))
        found = json.dumps(dataclasses.asdict(judged))
        print("judged:", found, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    serve()
