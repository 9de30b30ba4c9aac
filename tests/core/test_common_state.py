"""What processes compare: programs whatever their rank, and variables."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from keras import layers

import keras_conflux as kc
from keras_conflux._compat import replicated_extended
from keras_conflux._compat.tensorflow_internals import is_own_variable
from keras_conflux._replication import common_state
from keras_conflux._replication.common_program import CommonProgram

X = np.random.default_rng(1).normal(size=(10, 8)).astype("float32")


class Contrastive(keras.Model):
    """Compares all samples of a batch."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [
                layers.Dense(5, "relu"),
                layers.BatchNormalization(synchronized=True),
                layers.Dropout(0.3),
                layers.BatchNormalization(),
            ]
        )

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            rows = self(x, training=True)
            products = tf.matmul(rows, rows, transpose_b=True)
            loss = tf.reduce_mean(tf.reduce_logsumexp(products, 1))
            loss += 0.1 * tf.reduce_mean(rows**2)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "largest": tf.reduce_max(x)}


@several
def test_replicas_of_any_rank_trace_one_program(monkeypatch):
    programs = []
    original = CommonProgram.close

    def close(program):
        original(program)
        programs.append(program)

    monkeypatch.setattr(CommonProgram, "close", close)
    model = Contrastive()
    model.compile("adam", jit_compile=False)
    kc.replicate(model, devices=2)
    model.fit(X, X, batch_size=10, verbose=0)
    first, second = programs[-2:]
    assert not first._knows_rank
    assert not second._knows_rank
    texts = [
        sorted(line.text for line in each.lines) for each in (first, second)
    ]
    assert len(texts[0]) > 100
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("values", "alike"),
    [
        ([(3.0, 5.0), (3.0, 5.0)], True),
        ([(3.0, 5.0), (3.0 + 1e-5, 5.0)], True),
        ([(3.0, 5.0), (3.01, 5.0)], False),
        ([(3.0, 5.0), (3.0, 5.0), (3.0, 5.1)], False),
        ([(7.0, 0.0), (7.0, 0.0)], True),
        ([(7.0, 0.0), (8.0, 0.0)], False),
        ([(float("nan"), 1.0), (float("nan"), 1.0)], True),
        ([(float("nan"), 1.0), (2.0, 1.0)], False),
        ([(float("inf"), 1.0), (float("inf"), 1.0)], True),
    ],
)
def test_variables_are_alike_up_to_roundings(values, alike):
    assert common_state._are_alike([*map(list, values)]) == alike


def test_variables_are_compared_by_their_sums_and_norms():
    layer = keras.layers.Dense(2)
    layer.build((1, 1))
    weight = kc.replicate(layer, devices=MANY).bias
    weight.assign([3.0, 4.0])
    seeds = keras.random.SeedGenerator(4).state
    (whole, norm), (seed, nothing) = common_state._sums([weight, seeds])
    assert (whole, norm) == (7.0, 5.0)
    assert (seed, nothing) == (4.0, 0.0)


def test_variables_are_compared_where_processes_assign_others(monkeypatch):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    kc.replicate(model, MANY)
    compared = []

    def gather_if_different(what, own):
        compared.append(json.loads(own.text))
        return [json.loads(own.text)] if own.text in different else None

    monkeypatch.setattr(
        common_state, "gather_if_different", gather_if_different
    )
    different = set()
    common_state.agree_on_state(model, "an epoch")
    (values,) = compared
    assert sum(isinstance(each, list) for each in values) > 1
    replicated_extended.note_compared()
    monkeypatch.setattr(common_state, "process_count", lambda: 2)
    model.layers[0].bias.assign([3.0, 4.0])

    def compare():
        common_state.agree_on_assigned("a step", lambda: model.weights)

    compared.clear()
    different = {common_state.Comparable([[7.0, 5.0]]).text}
    compare()
    different = set()
    compare()
    model.layers[0].bias.assign([3.0, 4.0])
    compare()
    compare()
    assert [*map(len, compared)] == [1, 2, 0, 1, 0]


def test_ranks_of_replicas_are_no_variables_of_the_user():
    """Processes have others, and a compiled step that draws reads them."""
    ranks = kc.ReplicatedStrategy(MANY).ranks
    assert all(is_own_variable(copy.handle) for copy in ranks.values)
