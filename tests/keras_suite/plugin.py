"""A plugin for pytest that runs Keras' own tests under a strategy.

Every variable, optimizer, metric and model of a test is made in the scope of
the strategy. `run.py` starts pytest with it.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pytest
import tensorflow as tf

NAMES = ["CPU:0", "CPU:1"]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * len(NAMES),
)


def _strategy(name: str) -> tf.distribute.Strategy | None:
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(NAMES)
    if name == "conflux":
        import keras_conflux as kc

        return kc.replicate(devices=NAMES)
    return None


def _enter(strategy: tf.distribute.Strategy) -> None:
    """Makes the strategy that of the process, and of each test anew."""
    from keras.src import testing

    tf.distribute.experimental_set_strategy(strategy)
    # Tests that make a MirroredStrategy themselves get this one.
    tf.distribute.MirroredStrategy = lambda *args, **kwargs: strategy
    set_up = testing.TestCase.setUp

    def set_up_in_scope(test: Any) -> None:
        set_up(test)  # clears the session, and with it the strategy
        tf.distribute.experimental_set_strategy(strategy)

    testing.TestCase.setUp = set_up_in_scope


_chosen = _strategy(os.environ["KERAS_SUITE_STRATEGY"])
if _chosen is not None:
    _enter(_chosen)

_names: dict[str, str] = {}
_outcomes: dict[str, str] = {}


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Gives each test a name that does not depend on where Keras lies."""
    for item in items:
        module = item.module.__name__.removeprefix("keras.src.")
        _names[item.nodeid] = f"{module}:{item.location[2]}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remembers the worst outcome of a test's set-up, call and tear-down."""
    name = _names[report.nodeid]
    if _outcomes.get(name, "passed") == "passed":
        _outcomes[name] = report.outcome


def pytest_sessionfinish() -> None:
    """Writes a line per test, for `run.py`."""
    path = pathlib.Path(os.environ["KERAS_SUITE_OUTCOMES"])
    lines = [f"{outcome} {name}\n" for name, outcome in _outcomes.items()]
    path.write_text("".join(lines))
