"""Starts what is measured: each run a process with a time limit of its own.

What a run has printed is kept in a file, so that an interrupted measurement can
go on.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait
from pathlib import Path

from rich.console import Console

from examples.benchmarks import measured
from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.program_cache import exchange_folder

_PEERS = {"keras_jax": "jax", "pytorch": "torch"}
"""The modules that need not have what this package imports, by what they need.
"""
_ALL = "all"  # GPUs, where none are dealt out
_console = Console(stderr=True)  # what is no result


@dataclasses.dataclass(frozen=True)
class Run:
    """A module of this package, and what it is told."""

    module: str
    """Its name, such as `"train"`."""
    devices: int
    arguments: tuple[str, ...]
    is_training: bool = True
    """Whether it can be started again, to see how long that takes."""
    limit: float | None = None
    """How many seconds each of its processes may take, if not as many as all.
    """
    starts: int | None = None
    """How often it is started, if not as often as all."""

    @property
    def name(self) -> str:
        """What nothing else in a folder of runs is called."""
        words = [self.module, *self.arguments]
        return "_".join(word.strip("-") for word in words)


@dataclasses.dataclass
class Runner:
    """Starts runs, and keeps what they print."""

    folder: Path
    """Where it is kept."""
    pythons: Mapping[str, Sequence[str]]
    """By `"jax"` and `"torch"`, the command that starts their Python, if that
    is not the one of this process."""
    limit: float
    """How many seconds a process may take."""
    starts: int = 1
    """How often each training is started, with what the first has cached."""
    gpus: Sequence[str] = ()
    """The GPUs to deal out, each with as many cores, so that several runs go
    side by side. If empty, one run after another has all GPUs and cores."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running: set[subprocess.Popen] = set()
        self._ends = False

    def measure(
        self, runs: Sequence[Run], go_on: bool
    ) -> Iterator[tuple[Run, list[dict]]]:
        """Yields each run that ends, and what it has printed.

        What has failed has printed nothing.

        Args:
            runs: What to measure.
            go_on: Whether what is kept of these runs is taken as it is.
        """
        waiting = deque(runs)
        free = list(self.gpus or [_ALL])
        taken: dict[Future[list[dict]], tuple[Run, list[str]]] = {}
        workers = ThreadPoolExecutor(len(free))
        try:
            while waiting or taken:
                # In order: a run of many GPUs would wait for ever if others
                # could go ahead.
                while waiting and len(free) >= self._needs(waiting[0]):
                    run = waiting.popleft()
                    part = [free.pop(0) for _ in range(self._needs(run))]
                    end = workers.submit(self._lines, run, part, go_on)
                    taken[end] = run, part
                for end in wait(taken, return_when=FIRST_COMPLETED).done:
                    run, part = taken.pop(end)
                    free = sorted(free + part, key=[*self.gpus, _ALL].index)
                    yield run, end.result()
        finally:
            self._ends = True
            for process in list(self._running):
                _kill(process)
            workers.shutdown(cancel_futures=True)

    def _needs(self, run: Run) -> int:
        return run.devices if self.gpus else 1

    def _lines(self, run: Run, gpus: list[str], go_on: bool) -> list[dict]:
        kept = self.folder / f"{run.name}.json"
        if go_on and kept.exists():
            lines = json.loads(kept.read_text())
            if not self._lacks_starts(run, lines):
                return lines
        kept.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as cache:
            _console.print(f"[dim]{run.name}[/dim]", soft_wrap=True)
            environ = _environment(run, Path(cache))
            if self.gpus:
                environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            lines = self._output(run, gpus, environ)
            for _ in range(1, self._starts(run)):
                again = self._output(run, gpus, environ) if lines else []
                for line, other in zip(lines, again, strict=False):
                    measured.add_start(line, other)
        if lines:
            written = kept.with_suffix(".part")
            written.write_text(json.dumps(lines))
            written.replace(kept)
        return lines

    def _starts(self, run: Run) -> int:
        return (run.starts or self.starts) if run.is_training else 1

    def _lacks_starts(self, run: Run, lines: list[dict]) -> bool:
        return any(
            1 + len(line.get("later_starts_s", [])) < self._starts(run)
            for line in lines
        )

    def _output(
        self, run: Run, gpus: list[str], environ: Mapping[str, str]
    ) -> list[dict]:
        """Returns the lines of JSON that a process prints, if it succeeds."""
        limit = run.limit or self.limit
        package, folder = "examples.benchmarks", None
        needs = _PEERS.get(run.module)
        if needs:  # it cannot import this package
            package, folder = "benchmarks", Path(__file__).parent.parent
        python = self.pythons.get(needs or "", [sys.executable])
        command = [*python, "-m", f"{package}.{run.module}", *run.arguments]
        if run.is_training:
            command.append(f"--began={time.time()}")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environ,
            start_new_session=True,  # so that what it starts ends with it
        )
        self._running.add(process)
        try:
            if self.gpus:
                self._pin(process, gpus)
            if self._ends:
                _kill(process)
            out, said = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, said = process.communicate()
            said += f"\nIt was ended after {limit:g} s, its time limit."
        finally:
            self._running.discard(process)
        if process.returncode:
            (self.folder / f"{run.name}.log").write_text(said)
            last = said.strip()[-500:]
            _console.print(f"[red]failed[/red]: {run.name}\n", last)
            return []
        starts = (line for line in out.splitlines() if line.startswith("{"))
        return [json.loads(line) for line in starts]

    def _pin(self, process: subprocess.Popen, gpus: list[str]) -> None:
        """Gives a process, and what it starts, the cores of its GPUs."""
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // len(self.gpus)
        if share:
            firsts = [self.gpus.index(gpu) * share for gpu in gpus]
            own = [core for i in firsts for core in cores[i : i + share]]
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(process.pid, own)


def _environment(run: Run, cache: Path) -> dict[str, str]:
    """Returns the environment of a run whose caches of programs are empty."""
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        **os.environ,
        "KERAS_CONFLUX_CACHE": str(cache / "keras_conflux"),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    if run.module == "train" and "conflux" not in run.arguments:
        # Keras by itself has neither.
        environ["KERAS_CONFLUX_CACHE"] = environ[xla_flags.SWITCH] = "0"
    if run.module == "keras_jax":
        environ["KERAS_BACKEND"] = "jax"
    # Other programs may not know them.
    exchange_folder.remove_flags(environ)
    xla_flags.remove_products(environ)
    return environ


def _kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
