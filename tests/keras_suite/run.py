"""Runs the tests in Keras' wheel on one device, or on two replicas.

    python tests/keras_suite/run.py                     # all modules
    python tests/keras_suite/run.py --fast              # those that CI runs
    python tests/keras_suite/run.py losses metrics      # some modules
    python tests/keras_suite/run.py --strategy none     # on one device

Fails if a test fails on replicas that `expected_failures.toml` does not list,
or passes though it is listed, unless what it needs is missing on some machines.
docs/keras-suite.md has the results.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).parent
MODULES = (
    "backend.tensorflow.distribute_test",
    "backend.tensorflow.optimizer_distribute_test",
    "layers.attention",
    "layers.convolutional",
    "layers.core",
    "layers.normalization.batch_normalization_test",
    "layers.regularization",
    "layers.rnn",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "random",
    "saving",
    "trainers.compile_utils_test",
    "trainers.epoch_iterator_test",
    "trainers.trainer_test",
)
FAST = (
    "backend.tensorflow.distribute_test",
    "losses",
    "metrics",
    "optimizers",
    "trainers.compile_utils_test",
)
AT_ONCE = 2
"""How many modules run at the same time, each in a process of its own."""
SECONDS = 1800
"""The time limit of a module."""


def expected_failures() -> tuple[set[str], set[str]]:
    """Returns the names of the tests that may fail, and of those that must."""
    causes = tomllib.loads((HERE / "expected_failures.toml").read_text())
    may: set[str] = set()
    must: set[str] = set()
    for cause in causes["cause"]:
        may.update(cause["tests"])
        if not cause.get("may_pass"):
            must.update(cause["tests"])
    return may, must


def outcomes_of(module: str, strategy: str) -> tuple[dict[str, str], str]:
    """Runs a module. Returns what became of each test, and what was printed."""
    with tempfile.TemporaryDirectory() as folder:  # no conftest of ours there
        path = pathlib.Path(folder, "outcomes")
        sources = [str(HERE), str(HERE.parents[1])]
        sources += filter(None, [os.environ.get("PYTHONPATH")])
        environment = os.environ | {
            "KERAS_SUITE_STRATEGY": strategy,
            "KERAS_SUITE_OUTCOMES": str(path),
            "PYTHONPATH": os.pathsep.join(sources),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "--disable-warnings",
        ]
        command += ["-p", "plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["--rootdir", folder, "--pyargs", f"keras.src.{module}"]
        ran = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=SECONDS,
            capture_output=True,
            text=True,
        )
        if not path.exists() or not path.read_text():
            raise RuntimeError(f"{module} did not run:\n{ran.stdout[-4000:]}")
        lines = path.read_text().splitlines()
    pairs = [line.split(" ", 1) for line in lines]
    return {name: outcome for outcome, name in pairs}, ran.stdout


def report(module: str, strategy: str) -> bool:
    """Runs a module and prints its totals, and what is not as expected.

    Returns:
        Whether all is as expected.
    """
    began = time.monotonic()
    outcomes, printed = outcomes_of(module, strategy)
    totals = collections.Counter(outcomes.values())
    print(
        f"{strategy} {module}: {totals['passed']} passed, "
        f"{totals['failed']} failed, {totals['skipped']} skipped "
        f"in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    may_fail, must_fail = expected_failures()
    failed = {name for name in outcomes if outcomes[name] == "failed"}
    passed = {name for name in outcomes if outcomes[name] == "passed"}
    surprising = failed - may_fail
    lines = [f"FAILED {name}" for name in sorted(surprising)]
    if strategy == "conflux":
        mended = sorted(passed & must_fail)
        lines += [f"PASSED, but is listed to fail: {name}" for name in mended]
    if surprising:
        lines.append(printed[-20_000:])
    if lines:
        print(*lines, sep="\n", flush=True)
    return not lines


def main() -> int:
    """Returns 1 if tests on replicas did not do what is expected of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument(
        "--strategy", choices=["none", "mirrored", "conflux"], default="conflux"
    )
    options = parser.parse_args()
    modules = options.modules or (FAST if options.fast else MODULES)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(report, m, options.strategy) for m in modules]
    as_expected = all([each.result() for each in running])
    return int(not as_expected and options.strategy == "conflux")


if __name__ == "__main__":
    sys.exit(main())
