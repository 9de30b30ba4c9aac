"""Logical CPU devices, or the GPUs of the machine.

There are three CPU devices, and four with CONFLUX_ALL_TESTS=1.
"""

import collections
import gc
import os
import signal
import zlib

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

import keras_conflux as kc
from keras_conflux._compat import patching
from keras_conflux._fit.numerics import gradients

ON_GPU = bool(tf.config.list_physical_devices("GPU"))
RUN_LONG_TESTS = os.environ.get("CONFLUX_ALL_TESTS") == "1"
DEVICES = kc.devices(None if ON_GPU else 4 if RUN_LONG_TESTS else 3)
tf.config.list_logical_devices()  # starts TensorFlow; there are no more now
patching.begin()  # so a file finds what it finds after others
COUNTS = [count for count in (1, 2, 3, 4) if count <= len(DEVICES)]
MANY = COUNTS[-1]
several = pytest.mark.skipif(MANY < 2, reason="takes several devices")
ONE_AND_TWO = [None, pytest.param(2, marks=several)]  # `None`: one, plain Keras

# Files of few tests that take long. Processes run one file after another, and
# begin with these, so that none is left at the end while the others wait.
BEGIN_WITH = (
    "test_examples.py",
    "test_losses_and_metrics.py",
    "test_metrics_of_mixtures.py",
    "test_model_parallel.py",
    "test_neutral.py",
    "test_property.py",
    "test_property_steps.py",
    "test_recomputation.py",
)

# Of the cases that their marks leave, CI runs one in so many.
ONE_OF = 6
TESTS_BETWEEN_FREEZING = 20
_until_freezing = 0

# TF32 rounds to 11 bits, which would hide every other difference.
tf.config.experimental.enable_tensor_float_32_execution(False)

# What is drawn is the same in each run; a long search is done by hand, with
# HYPOTHESIS_PROFILE=search, and HYPOTHESIS_EXAMPLES if it shall be shorter.
hypothesis.settings.register_profile(
    "ci", max_examples=6, derandomize=True, deadline=None, database=None
)
hypothesis.settings.register_profile(
    "search",
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "600")),
    deadline=None,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config) -> None:
    """Makes this package's warnings errors where a test expects none."""
    config.addinivalue_line(
        "markers", "long: takes long, and runs with CONFLUX_ALL_TESTS=1 only"
    )
    config.addinivalue_line(
        "markers",
        f"sampled(every): one of {ONE_OF} times as many of its cases runs, and "
        "all of them with CONFLUX_ALL_TESTS=1 and on GPUs",
    )
    config.addinivalue_line(
        "filterwarnings", "error::keras_conflux.ConfluxWarning"
    )


def pytest_collection_finish() -> None:
    """Looks for unused objects less often."""
    gc.set_threshold(100_000, 20, 50)


def pytest_runtest_setup(item) -> None:
    """Looks for unused objects among those of the latest tests only.

    Keras and TensorFlow keep graphs of models that are gone. After some hundred
    tests it would take seconds to walk them, at each `clear_session`.
    """
    global _until_freezing
    if not _until_freezing:
        gc.collect()
        gc.freeze()
        _until_freezing = TESTS_BETWEEN_FREEZING
    _until_freezing -= 1


def pytest_collection_modifyitems(items) -> None:
    """Leaves tests out, unless all shall run, and puts long files first."""
    _leave_out(items)
    run = collections.Counter(
        item.path for item in items if not item.get_closest_marker("skip")
    )
    items.sort(
        key=lambda item: (item.path.name not in BEGIN_WITH, -run[item.path])
    )


def _leave_out(items) -> None:
    """Skips long tests and a part of many others, unless all shall run."""
    if RUN_LONG_TESTS:
        return
    skip = pytest.mark.skip(reason="takes long; CONFLUX_ALL_TESTS=1 runs it")
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
        elif not ON_GPU:
            cases[item.nodeid.partition("[")[0]].append(item)
    for test in cases.values():
        for item in _left_out(test):
            item.add_marker(skip)


def _left_out(cases) -> list:
    """Returns the cases of a test that CI leaves out.

    Of a sampled test those that remain are not every third, for example, which
    might all have the same number of devices. Tests on each number of devices
    run on one, which depends on the name of the test: every other one on the
    most, whose parts are the least even. Of what remains CI runs a sixth.
    """
    name = cases[0].originalname.encode()
    sampled = cases[0].get_closest_marker("sampled")
    if sampled:
        (every,) = sampled.args
        kept = [
            case
            for place, case in enumerate(cases)
            if place % every == place // every % every
        ]
    elif len(COUNTS) < 3 or not {*map(_count_of, cases)}.issuperset(COUNTS):
        return []
    else:
        draw = zlib.crc32(name) % (2 * len(COUNTS))
        count = MANY if draw >= len(COUNTS) else COUNTS[draw]
        kept = [case for case in cases if _count_of(case) == count]
    first = zlib.crc32(name) % min(ONE_OF, len(kept))
    return [case for case in cases if case not in kept[first::ONE_OF]]


def _count_of(case) -> int | None:
    """Returns what the fixture `count` gives to a case, if it takes that."""
    own = [mark.args[0] for mark in case.iter_markers("parametrize")]
    if "count" not in case.fixturenames or any("count" in x for x in own):
        return None
    return case.callspec.params["count"]


def pytest_xdist_auto_num_workers() -> int:
    """Some processes on CPUs; on GPUs the tests share the devices.

    One more than the cores of CI, as some tests wait most of the time.
    """
    return 0 if ON_GPU else 3


@pytest.fixture(params=COUNTS)
def count(request) -> int:
    """How many devices."""
    return request.param


@pytest.fixture
def dense_gradients(monkeypatch):
    """Makes sparse gradients dense before they are reduced, as on GPUs."""

    def repeatable(grads):
        return [*map(gradients.dense, grads)]

    monkeypatch.setattr(gradients, "repeatable", repeatable)


@pytest.fixture
def deterministic():
    """Makes programs deterministic on GPUs, where some kernels are not."""
    if not ON_GPU:
        yield
        return
    config.enable_op_determinism()
    yield
    config.disable_op_determinism()


@pytest.fixture
def in_float64():
    """Has Keras make variables, and take data, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)
    np.random.seed(0)


@pytest.fixture
def interruptible():
    """Interrupts are heard, also where the tests run in the background.

    Python drops those that come while a callback of the garbage collector
    runs, and Hypothesis has one.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


def pytest_report_header() -> str:
    return f"devices: {', '.join(DEVICES)}"


def pytest_terminal_summary(terminalreporter) -> None:
    """Says which tests were left out, and how much of the rules is proven."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2] for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} times {reason}")
    counts = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "teardown":
                continue
            for name, value in report.user_properties:
                if name == "proven":
                    counts.update(value)
    for what, count in counts.items():
        terminalreporter.write_line(f"proven: {count} {what}")
