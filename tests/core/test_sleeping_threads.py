"""A process does not die of the threads that TensorFlow leaves asleep."""

import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES

import keras_conflux as kc
from keras_conflux._communication.communicator import Communicator
from keras_conflux._communication.transports import xla
from keras_conflux._communication.transports.xla import CHECKED_EVERY
from keras_conflux._communication.transports.xla import SleepingThreads
from keras_conflux._fit.execution.xla_program import XlaProgram

LEAVES = """
import os, tensorflow as tf
CPU = tf.config.list_physical_devices("CPU")[0]
TWO = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(CPU, TWO)

@tf.function(jit_compile=True)
def reduced(x):
    return tf.raw_ops.CollectiveReduceV2(
        input=x, group_size=2, group_key=7, instance_key=1, ordering_token=[],
        merge_op="Add", final_op="Id", communication_hint="nccl")

@tf.function
def on_both():
    for index in range(2):
        with tf.device(f"CPU:{index}"):
            reduced(tf.ones(4))

def threads_after(calls):
    for _ in range(calls):
        try:
            on_both()
        except tf.errors.UnimplementedError:  # XLA has none between CPUs
            pass
    return len(os.listdir("/proc/self/task"))

print(-threads_after(5) + threads_after(100))
"""


@pytest.mark.long
def test_tensorflow_leaves_a_thread_for_each_call():
    """If this fails, `SleepingThreads` may go."""
    command = [sys.executable, "-c", LEAVES]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(out.stdout) >= 100


def test_threads_are_counted():
    used, limit = xla.threads_and_limit()
    assert threading.active_count() <= used < limit


def test_processes_agree_from_time_to_time(monkeypatch):
    counts = iter([(900, 1000), (3100, 4000), (2900, 4000), (3100, 4000)])
    monkeypatch.setattr(xla, "threads_and_limit", lambda: next(counts))
    threads = SleepingThreads()
    assert not any(threads.are_many("fit") for _ in range(CHECKED_EVERY))
    with pytest.warns(kc.ConfluxWarning, match="fit: this process has 3,100"):
        assert threads.are_many("fit")
    assert all(threads.are_many("fit") for _ in range(CHECKED_EVERY - 1))
    assert not any(threads.are_many("fit") for _ in range(CHECKED_EVERY))
    assert threads.are_many("fit")  # without another warning


@pytest.fixture
def few_threads(monkeypatch):
    """Says from the third execution on that threads are many."""
    asked = []

    def spares_threads(self, name):
        asked.append(name)
        return len(asked) > 2

    monkeypatch.setattr(Communicator, "spares_threads", spares_threads)
    return asked


def trained():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)]
    )
    model.compile("adam", "mse", jit_compile=True)
    kc.replicate(model, DEVICES[:1])
    x = np.arange(48, dtype="float32").reshape(16, 3) / 48
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)
    # A hook for each batch makes each step an execution.
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: None
    )
    model.fit(batches, verbose=0, callbacks=[each])
    return model.get_weights()


def test_fit_goes_on_without_xla(few_threads, monkeypatch):
    by_xla = []
    run = XlaProgram.__call__

    def counted(self, *arguments):
        by_xla.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(XlaProgram, "__call__", counted)
    got = trained()
    assert len(by_xla) == 2
    assert len(few_threads) == 8
    few_threads.clear()
    monkeypatch.setattr(Communicator, "spares_threads", lambda *_: False)
    for one, other in zip(got, trained(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert len(by_xla) == 2 + 8


def test_a_loop_goes_on_without_xla(few_threads):
    total = kc.replicate(lambda: tf.Variable(0.0), DEVICES[:1])
    traced = []

    @kc.withdevices(jit_compile=True, devices=DEVICES[:1])
    def step(x):
        traced.append(x.graph)
        total.assign_add(kc.allreduce("sum", x[0]))
        return total.read_value()

    for _ in range(4):
        result = step(kc.split(np.float32([1.0]), DEVICES[:1]))
    assert [*map(float, result)] == [4.0]
    assert len({*map(id, traced)}) == 2
    assert few_threads == [step.__qualname__] * 4
