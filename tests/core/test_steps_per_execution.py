"""Executions grow as fast as their batches can arrive."""

import sys

import numpy as np
import pytest

import keras_conflux as kc
from keras_conflux._fit.input import steps_per_execution
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.host_to_device import power_of_two
from keras_conflux._fit.input.step_groups import StepGroups
from keras_conflux._fit.input.steps_per_execution import NO_DEADLINE
from keras_conflux._fit.input.steps_per_execution import StepsPerExecution


def groups_of(maximum, shard):
    """Step groups of at most so many batches, which `shard` takes instead."""
    strategy = kc.replicate(devices=1)
    plan = ExecutionPlan(strategy, compiled=True, chooses_steps=True)
    groups = StepGroups(plan, 1)
    groups._shard, groups._steps.next = shard, maximum
    groups._steps._step_seconds = 1.0
    return groups


class Clock:
    """Tells the time of a story in which a step takes a second."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(
            steps_per_execution.time, "monotonic", lambda: self.now
        )


@pytest.mark.parametrize(
    ("drawing", "moving", "most_waited"),
    [(0, 0, 0), (0, 0.3, 2), (0.3, 0.1, 4), (0.7, 0.1, 20), (0.9, 0, 40)],
)
def test_devices_wait_little_for_longer_executions(
    drawing, moving, most_waited, monkeypatch
):
    """By fours, whatever the batches take, they would wait for up to 50 s."""
    clock = Clock(monkeypatch)

    def draw():
        while True:
            clock.now += drawing
            yield np.ones((8, 4), "float32")

    def shard(batches, spec):
        clock.now += moving * len(batches)
        return batches

    groups = groups_of(64, shard)
    source = draw()
    counts = [groups._draw(source, 4, NO_DEADLINE).count]
    waited = 0.0
    while counts[-1] < 64:
        running = counts[-1]
        end = clock.now + running
        budget = groups._steps.budget(running)
        maximum = min(4 * running, 64)
        counts.append(groups._draw(source, maximum, budget).count)
        waited += max(0.0, clock.now - end)
        clock.now = max(clock.now, end)
    assert waited <= most_waited
    assert counts == sorted(counts)
    assert len(counts) <= 16


def test_every_batch_is_run_once_and_in_order(monkeypatch):
    clock = Clock(monkeypatch)
    rng = np.random.default_rng(0)

    def draw():
        for position in range(100):
            clock.now += rng.choice([0.0, 0.5, 5.0])
            yield np.full((8, 4), position)

    groups = groups_of(16, lambda batches, spec: batches)
    source, seen = draw(), []
    drawn = groups._draw(source, 4, NO_DEADLINE)
    while drawn.error is None:
        seen += drawn.batches
        budget = groups._steps.budget(drawn.count)
        clock.now += drawn.count
        drawn = groups._draw(source, sys.maxsize, budget)
    seen += drawn.batches
    assert [int(batch[0, 0]) for batch in seen] == list(range(100))


def test_powers_of_two():
    for most in range(1, 70):
        power = power_of_two(most)
        assert power <= most < 2 * power
        assert bin(power).count("1") == 1


@pytest.mark.parametrize(
    ("size", "limit"), [(1, 256), (4, 128), (40, 16), (80, 16), (400, 4)]
)
def test_large_batches_make_shorter_executions(size, limit):
    """A quarter of the room is free, all of it for a few steps."""
    steps = StepsPerExecution(1, True, 64 * 40, "training")
    steps.note_batch(size)
    assert steps.limit == limit
