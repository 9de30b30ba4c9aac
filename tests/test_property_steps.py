"""Drawn steps, losses, state, metrics and logs against one device.

Each draw traces many programs, so a search is done by hand. It prints each
failure's smallest form:

    HYPOTHESIS_PROFILE=search python -m pytest tests/test_property_steps.py

`-k over_processes` draws for two processes alone.
"""

import functools
import os

import pytest
from conftest import COUNTS
from drawn_runs import runs
from drawn_runs import train
from hypothesis import HealthCheck
from hypothesis import event
from hypothesis import given
from hypothesis import reject
from hypothesis import settings
from models import assert_same_outcome
from models import moved_by_roundings
from models import size
from serving import Serving
from serving import assert_bitwise_equal

import keras_conflux as kc

pytestmark = pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "search",
    reason="takes minutes; HYPOTHESIS_PROFILE=search runs it",
)

NOTHING = 1e-6
"""A loss that stays below is a sum of what cancels out: it is all rounding."""


def compare(run, replicated) -> None:
    """Compares all that a training leaves with what it leaves on one device.

    Args:
        run: What was drawn.
        replicated: Returns what it leaves where it is replicated, or `None`
            after a warning.
    """
    try:
        expected = train(run)
    except ValueError:  # one device refuses it, as a loss without gradients
        reject()
    losses = [x for name, x in expected.items() if name.startswith("loss of")]
    if losses and max(map(size, losses)) < NOTHING:
        reject()
    got = replicated(run)
    if got is not None:
        assert_same_outcome(
            expected,
            got,
            rtol=3e-5,
            roundings=lambda: moved_by_roundings(
                expected, functools.partial(train, run)
            ),
        )


def on_devices(run):
    try:
        return train(run, count=run["count"])
    except NotImplementedError as error:
        if run["microbatches"] == 1:
            raise
        event("refused: " + str(error).split(":", 1)[1][:40])
        return None
    except kc.ConfluxWarning as warning:
        if run["count"] == run["microbatches"] == 1:
            raise
        # It is not equal, and the user is told.
        event("warned: " + str(warning).split(":", 1)[1][:40])
        return None


drawn = settings(
    max_examples=max(8, settings.default.max_examples // 5)
    if settings.default.derandomize
    else settings.default.max_examples,
    suppress_health_check=list(HealthCheck),
)


@drawn
@given(runs(COUNTS, (1, 1, 2, 3)))
def test_any_step_equals_one_device(run):
    compare(run, on_devices)


@pytest.fixture(scope="module")
def pair():
    with Serving(2, devices=2) as serving:
        yield serving


# Several devices, so that no draw is compiled by XLA.
@drawn
@given(runs([2, 3]))
def test_any_step_equals_one_device_over_processes(pair, run):
    def over_processes(run):
        # Two processes with one device each, or with two.
        found = pair.outcomes(("drawn", run), run["count"] - 1)
        if found is None:
            event("warned")
            return None
        assert_bitwise_equal(*found)
        return found[0]

    compare(run, over_processes)
