"""Batches that are moved ahead of use."""

import gc
import itertools
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY

import keras_conflux as kc
from keras_conflux._custom_loops import prefetcher

LAST = DEVICES[-1]


class Marker:
    """A leaf that is no number, and passes through."""


class Source:
    """Batches `{"x": [number, number]}`, of which it counts the drawn ones."""

    def __init__(self, count=None, fails_at=None):
        self.count = count
        self.fails_at = fails_at
        self.drawn = 0
        self.markers = weakref.WeakSet()

    def __iter__(self):
        numbers = itertools.count() if self.count is None else range(self.count)
        for number in numbers:
            if number == self.fails_at:
                raise ValueError(f"batch {number} is broken")
            self.drawn += 1
            marker = Marker()
            self.markers.add(marker)
            yield {"x": np.full(2, number, "float32"), "marker": marker}


def threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "conflux-prefetch"
    ]


def soon(condition):
    limit = time.monotonic() + 30
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    return condition()


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Objects of other test modules are not looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_thread_stays():
    yield
    gc.collect()
    assert soon(lambda: not threads())


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_batches_arrive_in_order_on_the_device(ahead):
    batches = list(kc.prefetch(Source(5), LAST, ahead=ahead))
    assert [float(batch["x"][0]) for batch in batches] == [0, 1, 2, 3, 4]
    assert kc.device_of(batches) == LAST


def test_any_iterable_of_any_trees():
    x, y = np.arange(10.0), np.arange(10)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    generator = ((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8))
    for batches in (dataset, generator, [*dataset]):
        got = list(kc.prefetch(batches, LAST))
        assert [len(x) for x, _ in got] == [4, 4, 2]
        assert kc.device_of(got) == LAST
        np.testing.assert_array_equal(tf.concat([y for _, y in got], 0), y)
    odd = [tf.ragged.constant([[1.0], []]), "text", None, (1, {"a": 2.0}), []]
    got = list(kc.prefetch(odd, LAST))
    assert kc.device_of(got[0]) == kc.device_of(got[3]) == LAST
    assert got[1:3] == ["text", None]
    assert list(kc.prefetch([], LAST)) == []
    there = kc.to_device(np.ones(3), LAST)
    assert next(iter(kc.prefetch([there], LAST))) is there


def test_a_source_may_use_its_buffer_again():
    buffer = np.zeros(1000, "float32")

    def batches():
        for number in range(6):
            buffer[:] = number
            yield buffer

    got = list(kc.prefetch(batches(), DEVICES[0], ahead=6))
    assert [float(batch[0]) for batch in got] == [0, 1, 2, 3, 4, 5]


def test_a_reader_that_is_faster_than_the_thread_gets_all_batches():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns between any two lines
    try:
        got = list(prefetcher.run_ahead(range(5000), str, 2))
    finally:
        sys.setswitchinterval(usual)
    assert got == [str(number) for number in range(5000)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_so_many_are_drawn_and_no_more(ahead):
    source = Source()
    batches = iter(kc.prefetch(source, LAST, ahead=ahead))
    assert source.drawn == 0
    for taken in (1, 2, 3):
        next(batches)
        assert soon(lambda least=taken + ahead: source.drawn >= least)
        time.sleep(0.2)
        assert source.drawn == taken + ahead
        assert len(source.markers) == ahead  # what was used is freed
    batches.close()
    assert soon(lambda: not source.markers)


def test_errors_come_where_their_batch_would_have():
    batches = iter(kc.prefetch(Source(9, fails_at=2), LAST, ahead=5))
    assert [float(next(batches)["x"][0]) for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="batch 2 is broken"):
        next(batches)
    assert list(batches) == []
    with pytest.raises(TypeError, match="Received: 3"):
        kc.prefetch(3, LAST)  # pyright: ignore


def test_a_batch_that_cannot_be_moved():
    batches = iter(kc.prefetch([1.0, tf.data.Dataset.range(2), 3.0], LAST))
    next(batches)
    with pytest.raises(TypeError, match="`prefetch` takes trees"):
        next(batches)


def leave_by_break(batches):
    for _ in batches:
        break


def leave_by_error(batches):
    with pytest.raises(KeyError):
        next(batches)["y"]


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, next])
def test_an_iterator_that_is_left_ends_its_thread(leave):
    source = Source()
    leave(iter(kc.prefetch(source, LAST)))
    assert soon(lambda: source.drawn and not threads())
    gc.collect()  # the error's traceback
    assert not source.markers


def test_closing_does_not_wait_for_a_source_for_ever(monkeypatch):
    monkeypatch.setattr(prefetcher, "_JOIN_TIMEOUT", 0.1)
    blocked = threading.Event()

    def batches():
        yield 1.0
        blocked.wait()
        yield 2.0

    iterator = iter(kc.prefetch(batches(), LAST))
    next(iterator)
    iterator.close()
    assert threads()
    blocked.set()


def test_wrong_arguments_are_told_at_once():
    for ahead in (0, -1):
        with pytest.raises(ValueError, match="a number of batches, at least 1"):
            kc.prefetch([], LAST, ahead=ahead)
    with pytest.raises(ValueError, match="or 0 to move each when"):
        kc.distribute([], MANY, ahead=-1)
    with pytest.raises(kc.DeviceError):
        kc.prefetch([], "GPU:98")


@pytest.mark.parametrize("distributed", [False, True])
def test_source_and_program_work_at_the_same_time(distributed):
    pause, count = 0.25, 8

    def batches():
        for number in range(count):
            time.sleep(pause)
            yield np.full(8, number, "float32")

    if distributed:
        ahead = kc.distribute(batches(), MANY, ahead=2)
    else:
        ahead = kc.prefetch(batches(), LAST)
    began = time.monotonic()
    for _ in ahead:
        time.sleep(pause)
    seconds = time.monotonic() - began
    # One after the other takes 2 * count pauses, at once count + 1.
    assert seconds < 1.7 * count * pause


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_distribute_gives_the_same_batches_ahead(count, ahead):
    x = {"a": np.arange(20.0), "none": None}
    y = tf.ragged.range(np.arange(20))
    dataset = tf.data.Dataset.from_tensor_slices((x["a"], y)).batch(7)
    batches = [({"a": a, "none": None}, y) for a, y in dataset]
    got = list(kc.distribute(batches, count, ahead=ahead))
    assert len(got) == 3
    for (xs, ys), batch in zip(got, batches, strict=True):
        assert xs.devices == ys.devices == DEVICES[:count]
        for part, device in zip(xs, DEVICES, strict=False):
            assert kc.device_of(part) == device
        np.testing.assert_array_equal(
            np.concatenate([part["a"] for part in xs]), batch[0]["a"]
        )
        assert tf.concat(list(ys), 0).to_list() == batch[1].to_list()


def test_a_scope_that_was_open_at_the_call_counts():
    with kc.replicate(devices=1):
        batches = kc.distribute([np.ones(4)] * 2, ahead=1)
    kc.replicate(devices=MANY)
    assert [batch.devices for batch in batches] == [DEVICES[:1]] * 2


MAKERS = {
    "prefetch": lambda source: kc.prefetch(source, LAST),
    "distribute": lambda source: kc.distribute(source, MANY),
    "ahead": lambda source: kc.distribute(source, MANY, ahead=2),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_epoch_is_an_iteration(make):
    dataset = tf.data.Dataset.range(10).batch(4)
    for source in (dataset, [*dataset]):
        batches = make(source)
        assert batches
        assert len(batches) == 3
        assert [len([*batches]) for _ in range(3)] == [3, 3, 3]
        for _ in batches:
            break
        assert len([*batches]) == 3


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_iterator_has_one_epoch_and_no_length(make):
    for source in (iter([np.ones(4)] * 2), (np.ones(4) for _ in range(2))):
        batches = make(source)
        assert batches
        with pytest.raises(TypeError, match="how many batches"):
            len(batches)
        assert len([*batches]) == 2
        with pytest.raises(ValueError, match="iterated over once"):
            iter(batches)
    with pytest.raises(TypeError, match=r"[Ii]nfinite|unknown"):
        len(make(tf.data.Dataset.range(3).repeat().batch(2)))


def test_an_iterator_goes_on_where_it_was_left():
    batches = kc.distribute(iter([np.zeros(4), np.ones(4), np.ones(4)]), MANY)
    assert float(next(iter(batches))[0][0]) == 0
    assert len([*batches]) == 2
