"""N replicas compute what one device computes, case by case."""

import os

import keras
import numpy as np
import pytest
from cases import CASES
from conftest import COUNTS
from conftest import ON_GPU
from models import assert_same_training

import keras_conflux as kc

# All of 1 to 4 by hand; in CI an even and an odd split of each case.
ALL = os.environ.get("CONFLUX_ALL_COUNTS") == "1"


class BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: np.asarray(v) for name, v in logs.items()})


def train(name, count=None):
    model = CASES[name].build()
    if count is not None:
        kc.replicate(model, count)
    logs = BatchLogs()
    history = model.fit(**CASES[name].fit(), callbacks=[logs])
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("many", [n for n in COUNTS if ALL or n in (2, 3)])
def test_equals_one_device(name, many, single):
    if ON_GPU and name == "embedding with sparse gradients and clipping":
        pytest.skip("one device clips by a norm that counts rows twice")
    one, one_history, one_batches = single(name)
    model, history, batches = train(name, many)
    rtol = CASES[name].rtol
    if CASES[name].counts_one_more:
        assert int(model.optimizer.iterations) == len(batches)
        one.optimizer.iterations.assign(len(batches))
    assert_same_training(one, model, one_history, history, rtol)
    kc.assert_in_sync(model)
    assert len(batches) == len(one_batches)
    for expected, got in zip(one_batches, batches, strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(
                got[key], value, rtol=rtol, atol=1e-6, err_msg=key
            )
