"""Processes that train together what they are asked for, again and again."""

import pathlib
import tempfile
import threading

import numpy as np
from started import start

SECONDS = 300
"""How long an answer is waited for."""


class Serving:
    """Starts processes when they are first asked, and anew after a failure.

    Args:
        count: How many.
        devices: How many devices each has.
    """

    def __init__(self, count, devices):
        self._count, self._devices = count, devices
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self._started:
            each.kill()
            each.communicate()
        self._started = []

    def outcomes(self, what, devices):
        """Returns what each process has computed, `None` after a warning.

        Args:
            what: `("case", name)` or `("drawn", run)`.
            devices: How many devices each process takes.
        """
        if not self._started:
            self._started = start(
                self._count, "process_serving.py", devices=self._devices
            )
        with tempfile.TemporaryDirectory() as directory:
            question = repr((*what, devices, directory))
            timer = threading.Timer(SECONDS, self._kill)
            timer.start()
            try:
                for each in self._started:
                    print(question, file=each.stdin, flush=True)
                answers = [answer(each) for each in self._started]
            finally:
                timer.cancel()
            if not {"trained", "warned"}.issuperset(answers):
                self.__exit__()
                raise AssertionError("\n---\n".join(answers))
            if "warned" in answers:
                return None
            paths = (
                pathlib.Path(directory, f"{index}.npz")
                for index in range(self._count)
            )
            return [dict(np.load(path)) for path in paths]

    def _kill(self):
        for each in self._started:
            each.kill()


def answer(process):
    """Returns what a process answers, or all that it has printed."""
    printed = []
    for line in process.stdout:
        if line.startswith("answer: "):
            return line.removeprefix("answer: ").strip()
        printed.append(line)
    return "".join(printed)[-3000:]


def assert_bitwise_equal(first, *others):
    for other in others:
        for name, value in first.items():
            assert other[name].tobytes() == value.tobytes(), name
