"""What callbacks hold is given back when a training goes on."""

import tracemalloc

import keras
import numpy as np
import pytest
from resume_cases import STEPS
from test_resume import Kill
from test_resume import Killed
from test_resume import linear

import keras_conflux as kc
from keras_conflux._resume.callback_state import CallbackStates


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


def test_a_value_that_is_what_it_was_at_first(tmp_path):
    callback, undisturbed = resumed(tmp_path / "small", lambda: OncePerEpoch(1))
    assert callback.done == undisturbed.done == 2
    with pytest.warns(kc.ConfluxWarning, match="'due' of OncePerEpoch is too"):
        resumed(tmp_path / "large", lambda: OncePerEpoch(2**21))


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
    states.changed({})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22
    callback.samples[0][7] = 1
    arrays = {}
    states.changed(arrays)
    (found,) = arrays.values()
    assert found[7] == 1
    assert not np.shares_memory(found, callback.samples[0])
