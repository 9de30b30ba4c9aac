"""`microbatches="auto"` runs as few turns as fit, and none that do not."""

import random
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import COUNTS
from conftest import MANY
from conftest import ON_GPU
from keras import layers
from models import assert_same_outcome
from models import outcome

import keras_conflux as kc
from keras_conflux._extensions.memory import fitting_turns
from keras_conflux._extensions.memory.fitting_turns import USED
from keras_conflux._extensions.memory.fitting_turns import FittingTurns
from keras_conflux._extensions.memory.fitting_turns import Use
from keras_conflux._fit.execution import turns as core
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import StackedBatch
from keras_conflux._fit.input.batches import StepGroup

MB = 1_000_000
X = np.random.default_rng(2).normal(size=(37, 8)).astype("float32")
Y = X[:, :1] * 2


class Memory:
    """A device that holds something, and more with each sample of a turn."""

    def __init__(self, monkeypatch, limit, held=100 * MB, of=None):
        self.limit, self.now, self.peak = limit, held, held
        self.rows = []
        self._of = of or (lambda rows: rows * MB)
        monkeypatch.setattr(fitting_turns, "tells", lambda device: True)
        monkeypatch.setattr(fitting_turns, "used", self._used)
        monkeypatch.setattr(fitting_turns, "set_back", self._set_back)

    def _used(self, device):
        return Use(self.now, self.peak, self.limit)

    def _set_back(self, device):
        self.peak = self.now

    def run(self, rows):
        """Runs a turn of so many samples, if it can."""
        self.rows.append(int(rows))
        self.peak = max(self.peak, self.now + self._of(int(rows)))
        assert self.peak <= USED * self.limit


def step(kept=0):
    return types.SimpleNamespace(name="m", kept_bytes=kept, on_whole_batch=step)


def batch_of(samples, *others, stacked=False, dtype="float32"):
    shape = (2, samples, *others) if stacked else (samples, *others)
    leaves = [tf.zeros(shape, dtype)]
    if stacked:
        return StackedBatch([leaves], (samples,), [None], 2)
    return Batch([leaves], (samples,), [None])


def numbers(turns, memory, batch, compiled=False, calls=9):
    """Returns the numbers of turns in which batches have run."""

    def run(count):
        memory.run(-(-batch.sizes[0] // count))
        return count

    return [turns.run(batch, compiled, run) for _ in range(calls)]


@pytest.mark.parametrize(
    ("samples", "fitting", "compiled", "wanted"),
    [
        (64, 100, True, 1),
        (64, 64, True, 1),
        (64, 63, True, 2),
        (64, 9, True, 8),
        (60, 9, False, 7),
        (37, 30, True, 37),
        (37, 30, False, 2),
        (5, 1, False, 5),
    ],
)
def test_the_fewest_that_fit(
    monkeypatch, capsys, samples, fitting, compiled, wanted
):
    memory = Memory(monkeypatch, (100 + fitting + 0.5) * MB / USED)
    turns = FittingTurns(step(), ["GPU:0", "GPU:1"])
    batch = batch_of(samples, 3, stacked=compiled)
    found = numbers(turns, memory, batch, compiled)
    assert found[0] == samples
    assert found[-1] == found[-5] == wanted
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f'm: microbatches="auto" is {wanted} in step' in said[0]
    assert f"batches of {samples}: at most" in said[0]


def test_nothing_runs_for_which_there_may_be_no_memory(monkeypatch):
    """What a step takes at one time or another grows in different ways."""
    drawn = random.Random(3)
    fewest = 0
    for _ in range(300):
        kept = drawn.choice([0, drawn.randrange(50)]) * MB
        times = [
            (drawn.randrange(100) * MB, 0),
            *[
                (kept + drawn.randrange(30) * MB, drawn.randrange(9 * MB))
                for _ in range(3)
            ],
        ]

        def of(rows, times=times):
            return max(begin + slope * rows for begin, slope in times)

        limit = (100 * MB + of(1) * drawn.uniform(1, 30)) / USED + MB / 100
        memory = Memory(monkeypatch, limit, of=of)
        samples = drawn.randrange(1, 200)
        compiled = drawn.random() < 0.5
        turns = FittingTurns(step(kept), ["GPU:0"])
        found = numbers(
            turns, memory, batch_of(samples, stacked=compiled), compiled, 20
        )
        assert found == sorted(found, reverse=True)
        assert found[-1] == found[-2]
        fits = [
            count
            for count in range(1, samples + 1)
            if not (compiled and samples % count)
            and of(-(-samples // count)) + 100 * MB <= USED * limit
        ]
        fewest += found[-1] <= 2 * fits[0]
    assert fewest > 200


def test_what_turns_add_up_counts_where_it_is_new():
    before, after = Use(100, 100, 1000), Use(100, 160, 1000)
    free = USED * 1000 - 20
    found = fitting_turns.times_that_fit(before, after, 40, 20)
    assert found == (free - 140) / 20
    found = fitting_turns.times_that_fit(before, after, 70, 20)
    assert found == (free - 100) / 60


def test_larger_batches_are_measured_anew(monkeypatch):
    memory = Memory(monkeypatch, 110.5 * MB / USED)
    turns = FittingTurns(step(), ["GPU:0"])
    assert numbers(turns, memory, batch_of(40, 6), calls=4) == [40, 5, 4, 4]
    assert numbers(turns, memory, batch_of(13, 6), calls=2) == [2, 2]
    assert numbers(turns, memory, batch_of(40, 5), calls=1) == [4]
    assert numbers(turns, memory, batch_of(40, 6), True, calls=3) == [40, 5, 4]
    assert numbers(turns, memory, batch_of(60, 6), calls=3) == [60, 8, 6]
    assert numbers(turns, memory, batch_of(40, 9), calls=3) == [40, 5, 4]


def test_entries_of_more_bytes_are_measured_anew(monkeypatch):
    memory = Memory(monkeypatch, 110.5 * MB / USED)
    turns = FittingTurns(step(), ["GPU:0"])
    images = [batch_of(40, dtype=dtype) for dtype in ("uint8", "float32")]
    assert numbers(turns, memory, images[0], calls=4) == [40, 5, 4, 4]
    assert numbers(turns, memory, images[1], calls=3) == [40, 5, 4]


def test_the_next_group_has_room(monkeypatch):
    memory = Memory(monkeypatch, 120.5 * MB / USED)
    turns = FittingTurns(step(), ["GPU:0"])
    batch = batch_of(40, 25_000)  # 4 MB
    turns.begins(StepGroup([batch] * 3, 3))
    assert numbers(turns, memory, batch, calls=4) == [40, 5, 5, 5]


def test_a_batch_without_samples(monkeypatch):
    memory = Memory(monkeypatch, 110.5 * MB / USED)
    turns = FittingTurns(step(), ["GPU:0"])
    assert numbers(turns, memory, batch_of(0), calls=2) == [1, 1]


def test_it_is_chosen_anew_where_memory_has_run_out(monkeypatch):
    memory = Memory(monkeypatch, 110.5 * MB / USED)
    turns = FittingTurns(step(), ["GPU:0"])
    batch = batch_of(40)
    assert numbers(turns, memory, batch, calls=4) == [40, 5, 4, 4]

    def fails(count):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        turns.run(batch, False, fails)
    assert "40 samples of a device in 4 parts" in caught.value.__notes__[-1]
    assert numbers(turns, memory, batch, calls=3) == [40, 5, 4]


class Seen(layers.Layer):
    """Tells of how many samples there are at once."""

    def __init__(self, memory):
        super().__init__()
        self._memory = memory

    def call(self, x, training=False):
        if training and self._memory is not None:
            tf.numpy_function(self._memory.run, [tf.shape(x)[0]], [])
        return x


def trained(count=None, memory=None, compiled=False):
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(6, "tanh"),
            layers.Dropout(0.4, seed=3),
            Seen(memory),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"], jit_compile=compiled)
    if count is not None:
        kc.replicate(model, count, microbatches="auto")
    x, y, size = (X[:36], Y[:36], 12) if compiled else (X, Y, 14)
    logs = model.fit(
        x,
        y,
        size,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(X, Y),
    )
    return outcome(model, logs)


@pytest.mark.sampled(3)
@pytest.mark.skipif(ON_GPU, reason="of a memory that is made up")
@pytest.mark.parametrize("count", COUNTS)
def test_training_is_that_of_one_device(monkeypatch, capsys, count):
    memory = Memory(monkeypatch, 103.5 * MB / USED)
    assert_same_outcome(trained(), trained(count, memory))
    assert set(memory.rows) >= {1, 3}
    assert max(memory.rows) == 3
    said = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "microbatches=" in line
    ]
    assert len(said) == 2
    wanted = -(-14 // count)
    assert f"is {-(-wanted // 3)} in train_step, for batches of 14" in said[0]
    assert "is 1 in test_step, for batches of 14" in said[1]


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="of a memory that is made up")
def test_compiled(monkeypatch):
    memory = Memory(monkeypatch, 104.5 * MB / USED)
    ran, kept = [], []
    original = FittingTurns.run

    def noted(self, batch, compiled, run):
        def run_noted(count):
            memory.run(-(-batch.sizes[0] // count))
            ran.append((batch.sizes[0], compiled, count))
            return run(count)

        result = original(self, batch, compiled, run_noted)
        kept.append(self._step.kept_bytes)
        return result

    monkeypatch.setattr(FittingTurns, "run", noted)
    wanted = trained(compiled=True)
    assert_same_outcome(wanted, trained(1, None, compiled=True))
    counts = [count for size, compiled, count in ran if compiled]
    assert sorted(set(counts)) == [3, 12]
    gradients = 4 * (8 * 6 + 6 + 6 + 1)
    assert gradients <= max(kept) <= gradients + 64  # and a few sums


@pytest.mark.skipif(ON_GPU, reason="of what does not tell its memory")
def test_devices_that_do_not_tell(capsys):
    assert_same_outcome(trained(), trained(MANY))
    said = capsys.readouterr().err
    assert said.count('microbatches="auto" is 1, as CPU:0 does not') == 1


class Standardized(layers.Layer):
    """Mixes the samples that it is given, in Python."""

    def call(self, x):
        mixed = tf.numpy_function(lambda x: x - x.mean(0), [x], x.dtype)
        return tf.ensure_shape(mixed, x.shape)


class AlwaysNormalized(layers.BatchNormalization):
    """Normalizes by samples, also when the model is evaluated."""

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=True, mask=mask)


def test_what_would_depend_on_memory(monkeypatch):
    Memory(monkeypatch, 500 * MB)

    def fit(*between, **options):
        model = keras.Sequential(
            [layers.Input((8,)), *between, layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=False, **options)
        kc.replicate(model, 1, microbatches="auto")
        model.fit(X, Y, verbose=0)

    with pytest.raises(NotImplementedError, match="which samples these are"):
        fit(Standardized())
    model = keras.Sequential([layers.Input((8,)), AlwaysNormalized()])
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, 1, microbatches="auto")
    with pytest.raises(NotImplementedError, match="by which samples"):
        model.evaluate(X, Y, verbose=0)
    # Each of these normalizes by no samples, or by all.
    fit(layers.BatchNormalization(trainable=False))
    fit(layers.BatchNormalization(), run_eagerly=True)


@pytest.mark.long
def test_what_it_cannot_be_chosen_for(monkeypatch):
    Memory(monkeypatch, MB)
    model = keras.Sequential(
        [layers.Input((8,)), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    wanted = model.evaluate(X, Y, verbose=0)
    kc.replicate(model, 1, microbatches="auto")
    found = model.evaluate(X, Y, verbose=0)  # it normalizes by no samples
    assert found == pytest.approx(wanted)
    with pytest.raises(NotImplementedError, match="by which samples"):
        model.fit(X, Y, verbose=0)
    kc.synchronize_batch_norm(model)
    model.fit(X, Y, verbose=0)
    monkeypatch.setattr(core, "_choosers", core._choosers[:1])
    model.compile("sgd", "mse", jit_compile=False)  # makes its step anew
    with pytest.raises(NotImplementedError, match="CONFLUX_EXTENSIONS=0"):
        model.fit(X, Y, verbose=0)
    fitting = FittingTurns(step(), ["GPU:0"])
    ragged = tf.RaggedTensor.from_row_splits(X[:, 0], [0, 20, 37])
    for leaves in ([ragged], [tf.zeros(())], [tf.zeros(4), tf.zeros(2)]):
        with pytest.raises(NotImplementedError, match="one row a sample"):
            fitting.run(Batch([leaves], (2,), [None]), False, int)
