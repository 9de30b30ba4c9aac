"""N replicas compute what one device computes, case by case."""

import os

import keras
import numpy as np
import pytest
from cases import CASES
from conftest import COUNTS
from conftest import MANY
from conftest import ON_GPU
from models import assert_same_training

import keras_conflux as kc

# By hand, each case on 1 to 4 devices. In CI it is on 2 or on 3.
ALL = os.environ.get("CONFLUX_ALL_COUNTS") == "1"


def runs():
    """Yields each case with how many devices, and whether XLA compiles it."""
    for index, name in enumerate(CASES):
        for count in COUNTS:
            if ALL or count == min(2 + index % 2, MANY):
                yield name, count, False
            # XLA has collectives for GPUs only.
            if count == (min(2, MANY) if ON_GPU else 1):
                yield name, count, True


class BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: np.asarray(v) for name, v in logs.items()})


def train(name, count=None, compiled=False):
    model = CASES[name].build()
    if compiled and hasattr(model, "jit_compile"):
        model.jit_compile = not model.run_eagerly
    if count is not None:
        kc.replicate(model, count)
    logs = BatchLogs()
    # A callback that looks at each batch gets each; without, many a call.
    callbacks = [] if compiled else [logs]
    history = model.fit(**CASES[name].fit(), callbacks=callbacks)
    return model, history, logs.seen


@pytest.fixture(scope="module")
def single():
    trained = {}

    def get(name):
        if name not in trained:
            trained.clear()
            trained[name] = train(name)
        return trained[name]

    return get


@pytest.mark.parametrize(("name", "count", "compiled"), runs())
def test_equals_one_device(name, count, compiled, single):
    if ON_GPU and name == "embedding with sparse gradients and clipping":
        pytest.skip("one device clips by a norm that counts rows twice")
    one, one_history, one_batches = single(name)
    model, history, batches = train(name, count, compiled)
    rtol = CASES[name].rtol
    if CASES[name].counts_one_more:
        assert int(model.optimizer.iterations) == len(one_batches)
        one.optimizer.iterations.assign(len(one_batches))
    assert_same_training(one, model, one_history, history, rtol)
    kc.assert_in_sync(model)
    if compiled:
        return
    assert len(batches) == len(one_batches)
    for expected, got in zip(one_batches, batches, strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(
                got[key], value, rtol=rtol, atol=1e-6, err_msg=key
            )
