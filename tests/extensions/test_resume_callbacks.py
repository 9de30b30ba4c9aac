"""What callbacks hold is given back when a training goes on."""

import collections
import random
import tracemalloc

import keras
import numpy as np
import pytest
from resume_cases import STEPS
from test_resume import Kill
from test_resume import Killed
from test_resume import linear

import keras_conflux as kc
from keras_conflux._extensions.resume.callback_state import CallbackStates


def resumed(folder, make, after=STEPS + 3, epochs=2):
    """Trains until a process is killed, then to the end with a new callback.

    Returns:
        The callback, and one of a training that was not interrupted.
    """
    undisturbed, killed, callback = make(), make(), make()
    linear(undisturbed, epochs=epochs)
    resume = kc.Resume(folder, every=1)
    with pytest.raises(Killed):
        linear(resume, killed, Kill(after), epochs=epochs)
    linear(kc.Resume(folder), callback, Kill(), epochs=epochs)
    return callback, undisturbed


class OncePerEpoch(keras.callbacks.Callback):
    """Does something after the first step of an epoch."""

    def __init__(self, size):
        super().__init__()
        self.due = np.zeros(size, bool)
        self.timer = None
        self.done = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.due = ~np.zeros_like(self.due)
        self.timer = object()

    def on_train_batch_end(self, batch, logs=None):
        assert self.timer is not None
        self.done += self.due[0]
        self.due = np.zeros_like(self.due)


@pytest.mark.long
@pytest.mark.parametrize("after", [STEPS + 3, STEPS - 2])
def test_a_value_that_is_what_it_was_at_first(tmp_path, after):
    callback, undisturbed = resumed(tmp_path, lambda: OncePerEpoch(9), after)
    assert callback.done == undisturbed.done == 2


class Odd(keras.callbacks.Callback):
    """Holds what is not a number, string or array."""

    def __init__(self, shared, rate):
        super().__init__()
        self.shared = shared
        self.first = self.second = []
        self.recent = collections.deque(maxlen=4)
        self.by_epoch = collections.defaultdict(list)
        self.seen = set()
        self.numpy = np.random.default_rng(1)
        self.python = random.Random(1)
        self.rate = keras.Variable(rate)
        self.constant = keras.Variable(rate)
        self.learned = None

    def on_epoch_begin(self, epoch, logs=None):
        self.learned = self.model.optimizer.learning_rate

    def on_train_batch_end(self, batch, logs=None):
        drawn = self.numpy.random() + self.python.random()
        self.shared.append(logs["loss"])
        self.first = self.first[:1] or [-drawn]
        self.second.append(drawn)
        self.recent.append(drawn)
        self.by_epoch["drawn"].append(drawn)
        self.seen.add(float(self.rate))
        self.rate.assign_add(0.5)

    def found(self):
        held = {**vars(self), "rate": float(self.rate)}
        names = ("shared", "first", "second", "recent", "by_epoch", "seen")
        return [held[name] for name in (*names, "rate")]


def test_what_else_a_callback_holds(tmp_path):
    shared = []

    def make():
        shared.append([])
        return Odd(shared[-1], rate=0.5)

    callback, undisturbed = resumed(tmp_path, make)
    assert callback.found() == undisturbed.found()
    assert shared[-1] == undisturbed.shared


def test_objects_that_could_lose_their_state_are_named(tmp_path):
    count = {"epochs": 0}

    def counting(epoch, logs):
        count["epochs"] += 1

    callback = keras.callbacks.Callback()
    callback.path = tmp_path
    callback.function = len
    callback.generator = np.random.default_rng(1)
    linear(kc.Resume(tmp_path / "a"), callback)  # nothing that could be lost
    callback.teacher = keras.Sequential(
        [keras.Input((5,)), keras.layers.BatchNormalization()]
    )
    callback.items = iter([1, 2])
    named = (
        r"holds.*: 'teacher' \(a Sequential\), 'items' \(a list_iterator\)\."
    )
    with pytest.warns(kc.ConfluxWarning, match=named):
        linear(kc.Resume(tmp_path / "b"), callback)
    lambdas = keras.callbacks.LambdaCallback(on_epoch_end=counting)
    with pytest.warns(kc.ConfluxWarning, match=r"'on_epoch_end' \(a function"):
        linear(kc.Resume(tmp_path / "c"), lambdas)


class Telling(keras.callbacks.Callback):
    state = None

    def __init__(self):
        super().__init__()
        self.told = {"constant": 3, "seen": 0}

    def on_train_batch_end(self, batch, logs=None):
        self.told["seen"] += 1

    def state_dict(self):
        return self.told

    def load_state_dict(self, state):
        self.told = {"constant": state["constant"], "seen": state["seen"]}


def test_all_that_a_callback_tells(tmp_path):
    callback, undisturbed = resumed(tmp_path, Telling)
    assert callback.told == undisturbed.told

    wrong = Telling()
    wrong.told["seen"] = np.random.default_rng(3)
    with pytest.raises(TypeError, match=r"Telling.*'seen'.* a Generator"):
        linear(kc.Resume(tmp_path / "wrong"), wrong)


def test_large_arrays_are_not_copied():
    callback = keras.callbacks.Callback()
    callback.samples = [np.zeros(2**23, "uint8")]
    tracemalloc.start()
    states = CallbackStates([callback])
    states.changed()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22
    callback.samples[0][7] = 1
    ((_, values),) = states.changed()
    (found,) = values["samples"]
    assert found[7] == 1
    assert not np.shares_memory(found, callback.samples[0])


def test_a_log_goes_on_in_its_file(tmp_path):
    path = tmp_path / "log.csv"
    resumed(tmp_path, lambda: keras.callbacks.CSVLogger(path))
    rows = [row.partition(",")[0] for row in path.read_text().splitlines()]
    # Those of an epoch that is trained again come twice.
    assert [*dict.fromkeys(rows)] == ["epoch", "0", "1"]
