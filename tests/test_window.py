"""Calls grow as fast as their batches can be there."""

import sys

import numpy as np
import pytest

import keras_conflux as kc
from keras_conflux._fit.input import epoch_iterator
from keras_conflux._fit.input.steps_per_execution import ENDLESS
from keras_conflux._fit.input.steps_per_execution import power_of_two


def chunks_of(most, split):
    """Chunks of at most so many batches, which `split` takes instead."""
    strategy = kc.replicate(devices=1)
    chunks = epoch_iterator._Chunks(
        strategy, 1, epoch_iterator.Plan(stacks=True, free=True)
    )
    chunks._split, chunks._size = split, most
    chunks._pace.note_call(1, 1.0)
    return chunks


class Clock:
    """Tells the time of a story in which a step takes a second."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(epoch_iterator.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(
    ("drawing", "moving", "most_waited"),
    [(0, 0, 0), (0, 0.3, 2), (0.3, 0.1, 4), (0.7, 0.1, 20), (0.9, 0, 40)],
)
def test_devices_wait_little_for_longer_calls(
    drawing, moving, most_waited, monkeypatch
):
    """By fours, whatever the batches take, they would wait for up to 50 s."""
    clock = Clock(monkeypatch)

    def draw():
        while True:
            clock.now += drawing
            yield np.ones((8, 4), "float32")

    def split(batches, spec):
        clock.now += moving * len(batches)
        return batches

    chunks = chunks_of(64, split)
    source = draw()
    counts = [chunks._draw(source, 4, ENDLESS).count]
    waited = 0.0
    while counts[-1] < 64:
        running = counts[-1]
        end = clock.now + running
        window = chunks._pace.window(running)
        most = min(4 * running, 64)
        counts.append(chunks._draw(source, most, window).count)
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

    chunks = chunks_of(16, lambda batches, spec: batches)
    source, seen = draw(), []
    drawn = chunks._draw(source, 4, ENDLESS)
    while drawn.error is None:
        seen += drawn.pieces
        window = chunks._pace.window(drawn.count)
        clock.now += drawn.count
        drawn = chunks._draw(source, sys.maxsize, window)
    seen += drawn.pieces
    assert [int(batch[0, 0]) for batch in seen] == list(range(100))


def test_powers_of_two():
    for most in range(1, 70):
        power = power_of_two(most)
        assert power <= most < 2 * power
        assert bin(power).count("1") == 1
