"""Variables are cut one after another, and nothing of the whole is left."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from keras import layers

import keras_conflux as kc
from keras_conflux._extensions.sharding import cutting

LAYERS = 4
WIDTH = 65  # of whose square no number of devices is a divisor


@pytest.fixture
def uncollected():
    """Memory is not to wait for the collector of unused objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@several
def test_one_whole_variable_at_a_time_is_there_besides(
    uncollected, monkeypatch
):
    model = keras.Sequential([layers.Input((WIDTH,))])
    for _ in range(LAYERS):
        model.add(layers.Dense(WIDTH, use_bias=False))
    variables = [weakref.ref(each.value) for each in model.weights]
    left, filled_up = [], []
    pad, apart = tf.pad, cutting.apart

    def alive():
        return sum(each() is not None for each in variables)

    def noted(tensor, *others):
        filled_up.append(tensor.shape.num_elements())
        return pad(tensor, *others)

    def counted(part):
        left.append(alive())
        return apart(part)

    monkeypatch.setattr(tf, "pad", noted)
    monkeypatch.setattr(cutting, "apart", counted)
    kc.replicate(model, devices=MANY, shard="weights")
    # Those that wait for it, and the one that is being cut.
    assert left == [LAYERS - n // MANY for n in range(LAYERS * MANY)]
    assert alive() == 0
    # No copy of a whole is made beside it.
    assert len(filled_up) == LAYERS
    assert max(filled_up) < WIDTH**2 / MANY
