"""A user's collectives inside `fit`, where replicas have no samples."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from models import Keeps
from models import assert_same_training

import keras_conflux as kc

pytestmark = pytest.mark.skipif(MANY < 3, reason="needs three devices")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(23, 6)).astype("float32")
Y = RNG.normal(size=(23, 1)).astype("float32")


def replicated() -> bool:
    return isinstance(tf.distribute.get_strategy(), kc.ReplicatedStrategy)


class Contrastive(keras.Model):
    """Tells each sample's other view from those of all samples."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, *_, **__):
        views = tf.roll(y_pred, 1, axis=1) + 0.1 * x[:, :4]
        first = 0
        rows = tf.shape(views)[0]
        if replicated():
            views = kc.allgather(views)
            first = tf.reduce_sum(kc.allgather(rows)[: kc.replica().index])
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(rows) + first, y_pred @ tf.transpose(views)
            )
        )


class Centered(keras.Model):
    """Has a loss of what differs from the mean over the batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, *_, **__):
        total = tf.reduce_sum(y_pred, 0)
        rows = tf.shape(y_pred)[0]
        if replicated():
            total, rows = kc.allreduce("sum", (total, rows))
        mean = total / tf.cast(rows, tf.float32)
        return tf.reduce_mean((y_pred - mean - y) ** 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("samples", [17, 23])
@pytest.mark.parametrize("kind", [Contrastive, Centered])
def test_a_loss_over_the_whole_batch(kind, samples):
    models = []
    for count in (None, MANY):
        keras.utils.set_random_seed(1)
        model = kind()
        model.compile(keras.optimizers.SGD(0.1))
        model(X[:2])
        if count:
            kc.replicate(model, count)
        data = X[:samples], Y[:samples]
        model.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0)
        models.append(model)
    assert_same_training(*models)
    kc.assert_in_sync(models[1])


def towards_slopes(net, x, y):
    """A stand-in has no slopes, by whose length the step divides."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum((net(x, training=True) - y) ** 2)
    slopes = tf.stop_gradient(tape.gradient(loss, x))
    x += 0.1 * slopes / tf.norm(slopes, axis=1, keepdims=True)
    return tf.reduce_sum((net(x, training=True) - y) ** 2)


def towards_slopes_from_the_mean(net, x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum((net(x) - y) ** 2)
    x += 0.1 * tf.math.l2_normalize(tape.gradient(loss, x), 1, epsilon=0.0)
    out = net(x)
    total, rows = tf.reduce_sum(out), tf.cast(tf.shape(x)[0], tf.float32)
    if replicated():
        total, rows = kc.allreduce("sum", (total, rows))
    return tf.reduce_mean((out - total / rows - y) ** 2)


def beside_a_variable(net, x, y):
    loss = tf.reduce_sum((net(x, training=True) - y) ** 2)
    return [loss, net.trainable_variables[0]]


def beside_ragged(net, x, y):
    out = net(x, training=True)
    splits = tf.range(tf.shape(out)[0] + 1)
    ragged = tf.RaggedTensor.from_row_splits(out[:, 0] ** 2, splits)
    return [tf.reduce_sum((out - y) ** 2), ragged]


def of_complex(net, x, y):
    return tf.reduce_mean(tf.cast(net(x, training=True) - y, tf.complex64) ** 2)


class Own(keras.Model):
    """Differentiates what a function returns."""

    def __init__(self, targets_of):
        super().__init__()
        self.targets_of = targets_of
        self.net = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, "tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            ]
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            targets = self.targets_of(self.net, *data)
        weights = self.net.trainable_variables
        slopes = tape.gradient(targets, weights, unconnected_gradients="zero")
        self.optimizer.apply(slopes, weights)
        return {"mean": tf.reduce_mean(data[0])}


def trained(model_of, samples):
    models = []
    for count in (None, MANY):
        keras.utils.set_random_seed(1)
        model = model_of()
        model.compile(keras.optimizers.SGD(0.02), jit_compile=False)
        if count:
            kc.replicate(model, count)
        data = X[:samples], Y[:samples]
        model.fit(*data, batch_size=MANY, shuffle=False, verbose=0)
        models.append(model)
    return models


@pytest.mark.parametrize("samples", [MANY - 1, 2 * MANY - 1])
@pytest.mark.parametrize(
    "targets_of",
    [
        towards_slopes,
        towards_slopes_from_the_mean,
        beside_a_variable,
        beside_ragged,
        of_complex,
    ],
)
def test_slopes_of_a_step_of_ones_own(targets_of, samples):
    one, many = trained(lambda: Own(targets_of), samples)
    for a, b in zip(one.get_weights(), many.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    kc.assert_in_sync(many)


def test_slopes_of_tensorflow_that_pass_an_exchange_warn():
    class Other(Own):
        def train_step(self, data):
            targets = self.targets_of(self.net, *data)
            weights = self.net.trainable_variables
            slopes = tf.gradients(targets, [each.value for each in weights])
            self.optimizer.apply(slopes, weights)
            return {"mean": tf.reduce_mean(data[0])}

    def total(net, x, y):
        return tf.reduce_sum((net(x, training=True) - y) ** 2)

    with pytest.warns(kc.ConfluxWarning, match="gradients of `tf.gradients`"):
        trained(lambda: Other(total), MANY - 1)


class Largest(keras.metrics.Metric):
    """The largest error of all samples of the last batch."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = keras.Variable(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        own = tf.reduce_max(tf.abs(y_true - y_pred))
        self.largest.assign(kc.allreduce("max", own))

    def result(self):
        return self.largest.value


def test_a_metric_that_reduces():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Largest()])
    kc.replicate(model, MANY)
    model.fit(X[:9], Y[:9], batch_size=8, verbose=0)
    found = model.evaluate(X[:9], Y[:9], batch_size=9, verbose=0)[1]
    expected = np.abs(model.predict(X[:9], verbose=0) - Y[:9]).max()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


OPS = {
    "sum": np.sum,
    "mean": np.mean,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("op", OPS)
def test_reductions(op, dtype, samples):
    def reduced(x):
        given = tf.cast(tf.reduce_sum(x), dtype)
        return {
            "all": kc.allreduce(op, given),
            "root": tf.cast(kc.reduce(op, given, root=0), "float32"),
        }

    x = np.arange(2, 2 + samples, dtype="float32")[:, None]
    parts = [each.sum() for each in np.array_split(x, MANY) if each.size]
    got = on_batch(reduced, x)
    np.testing.assert_allclose(got["all"], OPS[op](parts), rtol=1e-6)
    if samples == 1:  # the log is the mean over samples, and there is one
        np.testing.assert_allclose(got["root"], OPS[op](parts), rtol=1e-6)


@pytest.mark.parametrize("weight", [1.0, 3])
def test_a_weighted_mean(weight):
    def reduced(x):
        return {"mean": kc.allreduce("mean", x[0, 0], weight=weight)}

    got = on_batch(reduced, np.array([[2.0], [4.0]], "float32"))
    np.testing.assert_allclose(got["mean"], 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("samples", [1, 2, MANY + 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_what_is_joined(axis, samples):
    def joined(x):
        rows = x if axis == 0 else tf.transpose(x)
        gathered, flags = kc.allgather([rows, rows > 0], axis=axis)
        counts = kc.allgather(tf.shape(x)[0])
        return {
            "total": tf.reduce_sum(gathered),
            "rows": tf.size(gathered),
            "flags": tf.reduce_sum(tf.cast(flags, tf.int32)),
            "places": tf.size(counts),
            "samples": tf.reduce_sum(counts),
        }

    x = np.arange(1, 1 + samples, dtype="float32")[:, None]
    got = on_batch(joined, x)
    assert got == {
        "total": x.sum(),
        "rows": samples,
        "flags": samples,
        "places": MANY,
        "samples": samples,
    }


@pytest.mark.long
@pytest.mark.parametrize("root", range(MANY))
@pytest.mark.parametrize("samples", [1, 2])
def test_what_is_sent_comes_from_a_replica_with_samples(samples, root):
    def sent(x):
        rank = tf.constant(kc.replica().index)
        return kc.broadcast({"rank": rank, "sample": x[0, 0]}, root=root)

    x = np.arange(5, 5 + samples, dtype="float32")[:, None]
    sender = root if root < samples else 0  # the next one, as in a circle
    assert on_batch(sent, x) == {"rank": sender, "sample": 5 + sender}


def on_batch(step, x):
    """Returns the logs of a step of one's own on one batch."""

    class Model(keras.Model):
        def train_step(self, data):
            return step(data[0])

    model = kc.replicate(Model(), MANY)
    model.compile("sgd")
    return model.train_on_batch(x, return_dict=True)


@pytest.mark.long
@pytest.mark.parametrize("samples", [1, 9])
def test_a_queue_of_joined_rows_is_equal_on_all_replicas(samples):
    def push(kept, x):
        rows = kc.allgather(x) if replicated() else x
        kept.assign(tf.concat([rows, kept[None]], 0)[0])

    models = []
    for count in (None, MANY):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([Keeps(push), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        if count:
            kc.replicate(model, count)
        data = X[:samples], Y[:samples]
        model.fit(*data, batch_size=8, shuffle=False, verbose=0)
        models.append(model)
    assert_same_training(*models)
    kc.assert_in_sync(models[1])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: kc.allgather({"a": "text"}), r"\['a'\] is string"),
        (lambda x: kc.allgather(x, axis=7), "axis"),
        (lambda x: kc.allreduce("sum", x > 0), "the value is bool"),
        (lambda x: kc.allreduce("max", tf.cast(x, tf.int8)), "is int8"),
    ],
)
def test_what_cannot_be_exchanged_is_named(call, error):
    with pytest.raises((TypeError, ValueError), match=error):
        on_batch(lambda x: {"result": call(x)}, X[:1])
