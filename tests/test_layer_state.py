"""What layers keep of their data, and steps of one's own, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from keras import ops
from models import Keeps
from models import assert_same_training

import keras_conflux as kc

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 4)).astype("float32")
Y = RNG.normal(size=(22, 1)).astype("float32")


def _towards(kept, x):
    kept.assign_sub((kept - ops.mean(x, 0)) * 0.9)


def _from(kept, x):
    kept.assign_add((ops.mean(x, 0) - kept) * 0.1)


def _sums(kept, x):
    kept.assign_add(ops.sum(x, 0))


def _sums_in_a_branch(kept, x):
    tf.cond(
        tf.reduce_sum(kept) < 1e9,
        lambda: kept.assign_add(tf.reduce_sum(x, 0)),
        lambda: kept.value,
    )


def _sums_of_known_size(kept, x):
    int(x.shape[0])  # raises where it is not known
    kept.assign_add(tf.reduce_sum(x, 0))


def _sums_in_a_function(kept, x):
    @tf.function
    def add(x):
        kept.assign_add(tf.reduce_sum(x, 0))

    add(x)


def _averages(kept, x):
    kept.assign(kept * 0.9 + ops.mean(x, 0) * 0.1)


def both(build, x=X, y=Y, **fit):
    """Trains one model on a device and one on many."""
    models, histories = [], []
    for count in (None, MANY):
        keras.utils.set_random_seed(1)
        model = build()
        if count:
            kc.replicate(model, count)
        history = model.fit(x, y, shuffle=False, verbose=0, **fit)
        models.append(model)
        histories.append(history.history)
    kc.assert_in_sync(models[1])
    return models, histories


def _sums_by_samples(kept, x):
    tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: kept.assign_add(tf.reduce_sum(x, 0)),
        lambda: kept.value,
    )


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*any number of samples")
@pytest.mark.parametrize(
    ("update", "trainable"),
    [
        (_towards, False),
        (_from, False),
        (_sums, False),
        (_sums_of_known_size, False),
        (_sums_in_a_branch, False),
        (_sums_in_a_function, False),
        (_sums_by_samples, False),
        (_averages, True),
    ],
)
def test_what_a_layer_keeps(update, trainable):
    def build():
        model = keras.Sequential(
            [Keeps(update, trainable), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    # All devices divide it: a mean over a part of others is another mean.
    models, _ = both(build, X[:12], Y[:12], batch_size=12, epochs=3)
    one, many = (model.layers[0].kept.numpy() for model in models)
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


class KeepsRows(keras.layers.Layer):
    """Keeps some rows of its data.

    Args:
        choose: Called with the data and a generator, returns three rows.
    """

    def __init__(self, choose):
        super().__init__()
        self.choose = choose
        self.seed = keras.random.SeedGenerator(1)

    def build(self, shape):
        shape = (3, shape[-1])
        self.kept = self.add_weight(shape, "zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.kept.assign(self.choose(x, self.seed))
        return x


def _rows_at_random(x, seed):
    # A codebook takes samples for codes that nothing uses.
    count = ops.shape(x)[0]
    return ops.take(x, keras.random.randint((3,), 0, count, seed=seed), 0)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:.*for which samples:UserWarning")
@pytest.mark.parametrize(
    "choose",
    [
        lambda x, seed: x[:3],
        lambda x, seed: x[-3:],
        lambda x, seed: ops.sort(x, 0)[:3],
        _rows_at_random,
    ],
)
def test_rows_of_which_a_replica_has_too_few(choose):
    def build():
        model = keras.Sequential(
            [keras.Input((4,)), KeepsRows(choose), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    models, _ = both(build, batch_size=18)  # and 4, of which each has 1 or 2
    one, many = (model.layers[0].kept.numpy() for model in models)
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


def _sets_in_a_loop(kept, x):
    def body(i):
        kept.assign(tf.reduce_max(x, 0))
        return (i + 1,)

    tf.while_loop(lambda i: i < 2, body, [0])


def test_what_replicas_may_write_otherwise_warns():
    keeps = Keeps(_sets_in_a_loop, False)
    model = keras.Sequential([keeps, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    if MANY > 1:
        kc.replicate(model, MANY)
        with pytest.warns(kc.ConfluxWarning, match="in a loop, or in a branch"):
            model.fit(X, Y, batch_size=8, verbose=0)


def test_what_predict_keeps():
    class Counts(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight((), "zeros", trainable=False)

        def call(self, x):
            self.seen.assign_add(ops.sum(ops.ones_like(x[:, 0])))
            return x

    model = keras.Sequential([keras.Input((4,)), Counts()])
    kc.replicate(model, MANY)
    model.predict(X, batch_size=6, verbose=0)
    assert float(model.layers[0].seen) == len(X)
    kc.assert_in_sync(model)


@pytest.mark.parametrize("count", [1, MANY])
def test_what_was_frozen_can_be_trained_again(count):
    base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5)])
    model = keras.Sequential([base, keras.layers.Dense(1)])
    base.trainable = False
    kc.replicate(model, count)
    model.compile("sgd", "mse")
    frozen = base.get_weights()[0]
    model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(base.get_weights()[0], frozen)
    kc.unreplicate(model)
    kc.replicate(model, count)
    base.trainable = True
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert np.abs(base.get_weights()[0] - frozen).max() > 1e-4


class Own(keras.Sequential):
    """The `train_step` of Keras' guides, without `scale_loss`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        trained = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        return self.logs(loss)

    def logs(self, loss):
        return {"loss": loss, "twice": 2 * loss}


class Tracking(Own):
    """Returns a metric's result under another name."""

    def __init__(self, layers):
        super().__init__(layers)
        self.tracker = keras.metrics.Mean(name="generator_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def logs(self, loss):
        self.tracker.update_state(loss)
        return {"g_loss": self.tracker.result()}


class Clashing(Tracking):
    """Returns it under the name of another metric, which it updates too."""

    @property
    def metrics(self):
        return [self.tracker, *keras.Model.metrics.fget(self)]

    def logs(self, loss):
        self.tracker.update_state(loss)
        self._loss_tracker.update_state(2 * loss)
        return {"loss": self.tracker.result()}


class ByHand(Own):
    """Descends without an optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        trained = self.trainable_variables
        gradients = tape.gradient(loss, trained)
        for variable, gradient in zip(trained, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Own, Tracking, Clashing, ByHand])
@pytest.mark.parametrize(("samples", "batch_size"), [(16, 8), (22, 7)])
def test_a_step_of_ones_own(kind, samples, batch_size):
    def build():
        model = kind([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x, y = X[:samples], Y[:samples]
    models, histories = both(build, x, y, batch_size=batch_size, epochs=2)
    assert_same_training(*models)
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch_size", [8, 7, 5])
def test_synchronized_normalization_in_a_step_of_ones_own(batch_size):
    def build():
        model = Own(
            [
                keras.Input((4,)),
                keras.layers.Dense(4, use_bias=False),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        return model

    models, _ = both(build, batch_size=batch_size, epochs=2)
    assert_same_training(*models)
