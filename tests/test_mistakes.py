"""A mistake of a user's is refused with what to write."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from models import dense

import keras_conflux as kc

X = np.random.default_rng(0).normal(size=(12, 8)).astype("float32")
Y = X[:, :1]


def test_fit_in_a_step():
    model = kc.replicate(dense(), MANY)
    step = kc.withdevices(lambda x, y: model.fit(x, y, verbose=0))
    with pytest.raises(kc.StrategyError, match=r"outside of a `withdevices`"):
        step(*kc.split((X, Y), MANY))


def test_the_value_of_a_tensor_in_a_step():
    step = kc.withdevices(lambda x: tf.reduce_mean(x).numpy())
    with pytest.raises(AttributeError) as raised:
        step(kc.split(X, MANY))
    assert any("`tf.print`" in note for note in raised.value.__notes__)


def test_fit_of_batches_for_a_loop():
    model = kc.replicate(dense(), MANY)
    batches = kc.distribute([(X, Y)], MANY)
    with pytest.raises(ValueError, match=r"give `fit`, .* the data set itself"):
        model.fit(batches, verbose=0)
