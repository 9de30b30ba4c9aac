"""Muon's iterations run on one replica each, with the result of one device."""

import keras
import numpy as np
import pytest
from conftest import COUNTS
from conftest import ON_GPU
from conftest import several
from keras import layers
from keras import optimizers

import keras_conflux as kc

SEVERAL = [count for count in COUNTS if count > 1]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 66)).astype("float32")
MATRICES = 5  # of one shape, and one of another

pytestmark = several


def trained(count=None, shard=None, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [layers.Input((66,))]
        + [layers.Dense(66, "tanh") for _ in range(MATRICES)]
        + [layers.Dense(3)]
    )
    if count:
        kc.replicate(model, devices=count, shard=shard)
    optimizer = optimizers.Muon(0.01, weight_decay=0.1, **options)
    model.compile(optimizer, "mse")
    losses = model.fit(
        X, X[:, :3], batch_size=10, epochs=2, shuffle=False, verbose=0
    )
    return model, losses.history["loss"]


@pytest.fixture
def iterations(monkeypatch):
    """How often replicas have been traced to transpose in an iteration."""
    found = []
    original = optimizers.Muon.transpose_last_axis

    def noted(self, x):
        found.append(tuple(x.shape))
        return original(self, x)

    monkeypatch.setattr(optimizers.Muon, "transpose_last_axis", noted)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", SEVERAL)
@pytest.mark.parametrize("shard", [None, "optimizer", "weights"])
def test_training_equals_one_device(count, shard, iterations):
    options = {} if shard else {"gradient_accumulation_steps": 2}
    one, losses = trained(**options)
    assert iterations
    iterations.clear()
    many, found = trained(count, shard, **options)
    np.testing.assert_allclose(found, losses, rtol=5e-5)
    for a, b in zip(many.variables, one.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5, err_msg=a.path)
    kc.assert_in_sync(many)
    square = iterations.count((66, 66))
    rounds = -(-MATRICES // count)
    # Each of the five steps transposes once. All replicas are traced, but share
    # one trace where XLA compiles them.
    assert square % (5 * rounds * (1 if ON_GPU else count)) == 0
    assert square // (5 * rounds * count) in (1, 2)
