"""What an error of memory advises where the rest of a program refuses it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import several
from keras import layers

import keras_conflux as kc
from keras_conflux._compat import versions
from keras_conflux._extensions.memory import model_memory
from keras_conflux._extensions.memory import notes
from keras_conflux._replication import combinations


def said_of(model):
    error = tf.errors.ResourceExhaustedError(None, None, "OOM")
    notes.explain(error, model, keeps_activations=True)
    return " ".join(error.__notes__[0].split())


@several
def test_nothing_is_advised_that_is_refused(monkeypatch):
    model = keras.Sequential([layers.Input((64,)), layers.Dense(128)])
    kc.replicate(model, 2)
    model.compile("adam", "mse")
    said = said_of(model)
    assert "shard=" in said
    assert "microbatches=" in said
    monkeypatch.setitem(versions._left_out, "sharding", "it does not fit")
    with pytest.raises(NotImplementedError, match="it does not fit"):
        kc.replicate(model, 2, shard="weights")
    said = said_of(model)
    assert "shard=" not in said
    assert "microbatches=" in said
    assert "keras.RematScope" in said


@several
def test_a_sharded_model_is_not_advised_microbatches():
    model = keras.Sequential([layers.Input((64,)), layers.Dense(128)])
    kc.replicate(model, 2, shard="weights")
    model.compile("adam", "mse")
    assert "microbatches=" not in said_of(model)
    assert combinations.refusal("weights", 2) is not None


@pytest.mark.long
@several
def test_as_many_microbatches_are_advised_as_fit(monkeypatch):
    """The limit is that of a GPU that is made up, of which 0.9 are used."""
    model = keras.Sequential([layers.Input((32,)), layers.Dense(200)])
    kc.replicate(model, 2)
    model.compile("adam", "mse")
    held = kc.memory(model).variables
    gradients = 4 * model.count_params()
    limit = 0

    def of_gpu(strategy):
        return limit

    monkeypatch.setattr(notes, "limit_of", of_gpu)
    monkeypatch.setattr(model_memory, "limit_of", of_gpu)
    monkeypatch.setattr(
        notes.compat, "bytes_of_failed_program", lambda _: 2**21
    )
    assert "microbatches=2) saves at most" in said_of(model)
    limit = (held + gradients + 2**21 / 5) / 0.9  # a fifth fits
    saved = (2**21 * 7 / 8 - gradients) / 1e6
    assert f"microbatches=8) saves at most {saved:.3g} MB" in said_of(model)
    batch = [np.ones([4_000, n], "float32") for n in (32, 200)]
    step = kc.memory(model, batch).step
    limit = (held + gradients + step / 3) / 0.9
    advised = kc.memory(model, batch)
    assert advised.microbatches == 4
    assert "It fits with `replicate(..., microbatches=4)`" in str(advised)
    assert kc.memory(model, batch, devices=64).microbatches == 1
    limit = (held + gradients) / 0.9
    assert kc.memory(model, batch).microbatches is None
    assert kc.memory(model).microbatches is None


@several
def test_a_model_that_keras_distributes_is_not_told_to_be_replicated():
    distribution = keras.distribution.DataParallel()
    try:
        keras.distribution.set_distribution(distribution)
        model = keras.Sequential([layers.Input((64,)), layers.Dense(128)])
        said = said_of(model)
        with pytest.raises(kc.StrategyError, match="on it first"):
            kc.replicate(model, shard="weights")
    finally:
        keras.distribution.set_distribution(None)
    assert "shard=" not in said
    assert "keras.distribution.ModelParallel" in said
    assert "saves at most" in said
    assert "microbatches=2" in said


def test_turns_are_not_advised_to_layers_that_refuse_them():
    given = layers.Input((3, 4), batch_size=2)
    output = layers.Dense(1)(layers.LSTM(8, stateful=True)(given))
    model = kc.replicate(keras.Model(given, output), 1)
    model.compile("adam", "mse")
    assert "microbatches=" not in said_of(model)
    kc.replicate(model, microbatches=2)
    with pytest.raises(kc.StrategyError, match="has `stateful=True`"):
        model.fit(tf.ones([2, 3, 4]), tf.ones([2, 1]), verbose=0)
