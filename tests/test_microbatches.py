"""`microbatches=k` changes memory, and nothing else."""

import functools
import os
import re

import forked
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import CASES
from cases_trained import train
from conftest import COUNTS
from conftest import MANY
from conftest import ON_GPU
from conftest import RUN_LONG_TESTS
from conftest import several
from keras import layers
from models import assert_same_outcome
from models import assert_same_training
from models import outcome
from test_equal import SEES_SINGLE_ROWS
from test_equal import on_one_device
from test_equal import roundings

import keras_conflux as kc

X = np.random.default_rng(2).normal(size=(37, 8)).astype("float32")
Y = X[:, :1] * 2
IN_CI = (
    "accumulation of 2",
    "accumulation with loss scaling",
    "convolution and synchronized statistics",
    "embedding, mask and LSTM",
    "last batch of one sample",
    "moving average of a layer",
    "own train_step",
    "sample_weight",
    "several inputs, outputs and losses",
)


def in_parts(model, microbatches):
    return kc.replicate(model, microbatches=microbatches)


def assert_equals_one_device(name, count, microbatches, compiled=False):
    prepare = functools.partial(in_parts, microbatches=microbatches)
    got = train(name, count, compiled, prepare)
    wanted = on_one_device(name)
    if compiled:
        wanted = {k: v for k, v in wanted.items() if " of batch " not in k}
    assert_same_outcome(wanted, got, CASES[name].rtol, lambda: roundings(name))


def runs():
    names = CASES if RUN_LONG_TESTS else IN_CI
    for index, name in enumerate(names):
        for count in COUNTS[:2]:
            for microbatches in (2, 3):
                one_of_four = (count + 2 * microbatches) % 4 == index % 4
                if RUN_LONG_TESTS or one_of_four:
                    yield name, count, microbatches


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "count", "microbatches"), list(runs()))
def test_equals_one_device(name, count, microbatches):
    if ON_GPU and name in SEES_SINGLE_ROWS:
        pytest.skip("rows that repeat are added up before the optimizer")
    if name == "strings" and not ON_GPU:
        pytest.skip("looks words up, and has sparse gradients")
    assert_equals_one_device(name, count, microbatches)


@pytest.mark.long
@pytest.mark.parametrize("name", ["several inputs, outputs and losses"])
def test_compiled(name):
    """The last batch of 13 runs as a graph, and others are compiled."""
    assert_equals_one_device(name, 1, 2, compiled=True)


@pytest.mark.long
def test_assertions_do_not_keep_xla_from_compiling():
    """Keras asserts the shape of labels. XLA leaves that out."""

    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = keras.Sequential(
            [layers.Input((None, 4)), layers.Dense(8), layers.Dense(4)]
        )
        model.compile("adam", loss, jit_compile=True)
        return model

    x = np.random.default_rng(0).normal(size=(16, 6, 4)).astype("float32")
    outcomes = []
    for options in {}, {"microbatches": 2}:
        keras.utils.set_random_seed(5)
        model = kc.replicate(build(), 1, **options)
        logs = model.fit(x, x.argmax(-1), batch_size=8, verbose=0)
        outcomes.append(outcome(model, logs))
    assert_same_outcome(*outcomes)


class Contrastive(keras.Model):
    """Compares each sample with all of the batch."""

    def __init__(self):
        super().__init__()
        self.one = layers.Dense(6, use_bias=False)
        self.other = layers.Dense(6, use_bias=False)
        self.drop = layers.Dropout(0.4, seed=3)

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)
        self.built = True

    def call(self, x, training=False):
        return self.one(self.drop(x, training=training)), self.other(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            one, other = self(data[0], training=True)
            logits = tf.matmul(one, other, transpose_b=True)
            labels = tf.range(tf.shape(logits)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, logits
            )
            loss = tf.reduce_mean(losses)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        gradients = [each / (1 + norm) for each in gradients]
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, "norm": norm, "pairs": tf.size(logits)}


def trained(build, count=None, **options):
    keras.utils.set_random_seed(5)
    model = build()
    if count is not None:
        kc.replicate(model, count, **options)
    logs = model.fit(X, Y, batch_size=14, epochs=2, shuffle=False, verbose=0)
    return outcome(model, logs)


def contrastive():
    model = Contrastive()
    model.build((None, 8))
    model.compile("adam", jit_compile=False)
    return model


@pytest.mark.long
def test_a_loss_that_compares_samples():
    wanted = trained(contrastive)
    for count, microbatches in ((1, 3), (2, 2)):
        found = trained(contrastive, count, microbatches=microbatches)
        assert_same_outcome(wanted, found)


def dense_with(*layer):
    def build():
        model = keras.Sequential([layers.Input((8,)), *[x() for x in layer]])
        model.add(layers.Dense(1))
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
        return model

    return build


@pytest.mark.long
def test_unsynchronized_normalization_is_that_of_as_many_replicas(caplog):
    build = dense_with(layers.BatchNormalization)
    found = trained(build, 1, microbatches=2)
    assert "each of 2 parts of a batch is normalized" in caplog.text
    if MANY > 1:
        assert_same_outcome(trained(build, 2), found)


@pytest.mark.long
def test_scope_and_single_batches():
    keras.utils.set_random_seed(5)
    one = dense_with(lambda: layers.Dropout(0.5, seed=1))()
    keras.utils.set_random_seed(5)
    with kc.replicate(devices=COUNTS[-1], microbatches=2):
        many = dense_with(lambda: layers.Dropout(0.5, seed=1))()
    for batch in (X[:9], X[9:11], X[11:12]):
        wanted = one.train_on_batch(batch, batch[:, :1])
        found = many.train_on_batch(batch, batch[:, :1])
        np.testing.assert_allclose(wanted, found, rtol=1e-5)
    assert_same_training(one, many)
    wanted = one.evaluate(X, Y, 7, verbose=0)
    np.testing.assert_allclose(many.evaluate(X, Y, 7, verbose=0), wanted, 1e-5)
    np.testing.assert_allclose(
        many.predict(X, 7, verbose=0), one.predict(X, 7, verbose=0), 1e-5
    )


def test_another_number_is_traced_for():
    model = kc.replicate(dense_with()(), 1, microbatches=2)
    model.fit(X, Y, 14, verbose=0)
    assert kc.replicate(model, 1) is model  # leaves it as it is
    function = model.train_function
    kc.replicate(model, microbatches=2)
    assert model.train_function is function
    kc.replicate(model, microbatches=3)
    assert model.train_function is None


class Sets(layers.Layer):
    """Sets a variable in a branch, to what depends on the samples."""

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        tf.cond(
            tf.reduce_sum(self.kept) > 0,
            lambda: self.kept.assign(tf.reduce_mean(x)),
            lambda: self.kept.assign(tf.reduce_max(x)),
        )
        return x


class Plain(layers.Layer):
    """Adds to a plain variable."""

    def build(self, shape):
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.count.assign_add(tf.reduce_sum(x))
        return x


class AsksWhich(layers.Layer):
    def call(self, x, training=False):
        return x + kc.replica().index if training else x


class Reduces(layers.Layer):
    def call(self, x, training=False):
        return x + kc.reduce("sum", tf.reduce_sum(x)) if training else x


@pytest.mark.filterwarnings("ignore::keras_conflux.ConfluxWarning")
@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Sets, "in a branch, a loop or a function"),
        (Plain, "AssignAddVariableOp"),
        (AsksWhich, "number of Python"),
        (Reduces, 'Write `allreduce\\("sum", ...\\)`, or leave'),
    ],
)
def test_what_cannot_run_in_turns_is_refused(layer, says):
    model = kc.replicate(dense_with(layer)(), 1, microbatches=2)
    with pytest.raises(NotImplementedError, match=says):
        model.fit(X, Y, 14, verbose=0)


def test_a_layer_that_keeps_states_of_rows_is_named():
    given = layers.Input(batch_shape=(12, 4, 2))
    states = layers.GRU(3, stateful=True, name="remembers")(given)
    model = keras.Model(given, layers.Dense(1)(states))
    model.compile("sgd", "mse")
    kc.replicate(model, 1, microbatches=2)
    x, y = np.zeros([12, 4, 2]), np.zeros([12, 1])
    model.predict(x, 12, verbose=0)  # runs whole
    says = r"'remembers' has `stateful=True`.*Received: microbatches=2"
    with pytest.raises(kc.StrategyError, match=says):
        model.fit(x, y, 12, verbose=0)


class Multiplies(keras.Model):
    """Multiplies the losses of all replicas, or of all turns."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(self(x) - y))
            loss = kc.allreduce("product", error)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def multiplying():
    model = Multiplies()
    model(X[:1])
    model.compile(keras.optimizers.SGD(1e-4), jit_compile=False)
    return model


@pytest.mark.long
@several
def test_a_product_is_that_of_as_many_replicas():
    expected = trained(multiplying, 2)
    found = trained(multiplying, 1, microbatches=2)
    assert_same_outcome(expected, found)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.kept = self.add_variable((), "zeros", name="kept")

    def update_state(self, y, predicted, sample_weight=None):
        largest = keras.ops.max(keras.ops.abs(y - predicted))
        self.kept.assign(keras.ops.maximum(self.kept, largest))

    def result(self):
        return self.kept + 0.0


class ReadsItsMetric(keras.Model):
    """Weighs its loss by what it has counted, of which turns read the same."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.counted = keras.metrics.Sum(name="counted")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        tf.debugging.assert_less(tf.abs(x), 50.0)
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(self(x, training=True) - y))
            loss = error / (1 + 0.1 * self.counted.result())
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.counted.update_state(tf.abs(y))
        self.compute_metrics(x, y, self(x), None)
        return {"loss": loss, "twice": self.counted.result() * 2.0}


def reading():
    model = ReadsItsMetric()
    model(X[:1])
    model.compile("sgd", metrics=[Largest()], jit_compile=False)
    return model


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::keras_conflux.ConfluxWarning")
def test_turns_read_what_the_replica_has_counted():
    expected, got = trained(reading), trained(reading, MANY, microbatches=2)
    assert_same_outcome(expected, got)


class MeasuresAfterwards(keras.Model):
    """Makes the variables of its metrics while its step is traced."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, self(x), None)


def measuring():
    given = layers.Input((8,))
    model = MeasuresAfterwards(given, layers.Dense(1)(given))
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model


@pytest.mark.long
def test_a_turn_that_makes_variables_is_traced_twice():
    expected, got = trained(measuring), trained(measuring, MANY, microbatches=2)
    assert_same_outcome(expected, got)


def test_an_assertion_of_one_turn_raises():
    model = kc.replicate(reading(), 1, microbatches=3)
    x = X.copy()
    x[9] = 60
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(x, Y, 14, verbose=0)


def test_an_error_of_the_users_is_theirs():
    class Mistyped(ReadsItsMetric):
        def train_step(self, data):
            return self.optimizer.no_such_thing(data)

    model = Mistyped()
    model.compile("sgd", jit_compile=False)
    kc.replicate(model, 1, microbatches=2)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12, True)
    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        model.fit(data, verbose=0)
    assert "any number of samples" in caught.value.__notes__[-1]


class LooksUp(ReadsItsMetric):
    """Takes rows of one leaf for those of another, by their numbers."""

    def train_step(self, data):
        nodes, index = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(tf.gather(nodes, index)) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_leaves_of_different_lengths_warn():
    model = LooksUp()
    model(X[:1])
    model.compile("sgd", jit_compile=False)
    kc.replicate(model, 1, microbatches=2)
    data = tf.data.Dataset.from_tensors((X[:12], tf.range(6)))
    with pytest.warns(kc.ConfluxWarning, match="different numbers of rows"):
        model.fit(data, verbose=0)


class DrawsInFunction(layers.Layer):
    """Draws in a function of TensorFlow's."""

    def __init__(self, seed=3):
        super().__init__()
        self.noisy = tf.function(
            lambda x: x + keras.random.normal(tf.shape(x), seed=seed)
        )

    def call(self, x):
        return self.noisy(x)


@pytest.mark.long
def test_draws_in_functions():
    """They are one device's, unless the state of a generator is written."""
    wanted = trained(dense_with(DrawsInFunction))
    found = trained(dense_with(DrawsInFunction), MANY, microbatches=2)
    assert_same_outcome(wanted, found)
    seed = keras.random.SeedGenerator(3)
    build = dense_with(lambda: DrawsInFunction(seed))
    with pytest.raises(NotImplementedError, match="one device writes once"):
        trained(build, MANY, microbatches=2)


@pytest.mark.parametrize(
    ("microbatches", "error"),
    [(0, ValueError), (1.5, TypeError), (True, TypeError), ("all", TypeError)],
)
def test_what_is_no_number_is_refused(microbatches, error):
    with pytest.raises(error, match=r"microbatches.*at least 1"):
        kc.replicate(dense_with()(), microbatches=microbatches)
    with pytest.raises(error, match=r"microbatches.*at least 1"):
        kc.replicate(microbatches=microbatches)


def test_numbers_of_numpy_count():
    model = kc.replicate(dense_with()(), 1, microbatches=np.int64(2))
    model.fit(X[:12], Y[:12], 6, verbose=0)
    assert kc.replicate(microbatches=np.int64(2)) is kc.replicate(
        microbatches=2
    )


def test_what_it_has_no_meaning_for():
    with pytest.raises(TypeError, match="microbatches"):
        kc.replicate(keras.optimizers.SGD(), microbatches=2)
    with pytest.raises(NotImplementedError, match="shard"):
        kc.replicate(dense_with()(), 1, shard="optimizer", microbatches=2)


STEPS = """
import sys
import keras
import numpy as np
import keras_conflux as kc

for microbatches in (1, 4):
    model = keras.Sequential([keras.layers.Input((64,))])
    for _ in range(3):
        model.add(keras.layers.Dense(256, "gelu"))
    model.compile("sgd", "mse", jit_compile=True)
    kc.replicate(model, "CPU:0", microbatches=microbatches)
    x = np.ones((2048, 64), "float32")
    model.fit(x, np.ones((2048, 256), "float32"), 2048, verbose=0)
"""


@pytest.mark.long
def test_a_compiled_step_needs_less_memory(tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    ended = forked.run(
        *("-c", STEPS),
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "CONFLUX_EXTENSIONS": "0",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert ended.returncode == 0, ended.stderr
    reports = sorted(tmp_path.glob("*many_steps*memory-usage-report.txt"))
    whole, in_turns = (
        int(re.findall(r"Total bytes used: (\d+)", each.read_text())[0])
        for each in sorted(reports, key=lambda path: path.stat().st_mtime)
    )
    assert in_turns < 0.5 * whole
