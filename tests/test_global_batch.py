"""Steps of a user's own: losses, gradients, state and logs of any form.

Each trains on one device and on several, with a last batch that has fewer
samples than there are devices.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from keras import layers
from keras import ops
from models import assert_same_training
from models import regression

import keras_conflux as kc

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 6)).astype("float32")
Y = RNG.normal(size=(20, 3)).astype("float32")
# The last batch has two samples, fewer than there are devices.
FIT = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}

unreduced = keras.losses.MeanSquaredError(reduction="none")


@tf.function
def _mean_in_a_function(y, p):
    return tf.reduce_mean((y - p) ** 2)


@tf.function
def _sum_in_a_function(y, p):
    return 0.1 * tf.reduce_sum((y - p) ** 2)


@tf.function
def _root_in_a_function(y, p):
    return tf.sqrt(tf.reduce_mean((y - p) ** 2))


def _per_sample(y, p):
    return tf.reduce_sum((y - p) ** 2, -1)


def _masked_mean(model, x, y, p):
    mask = tf.cast(y[:, 0] > 0, tf.float32)
    return tf.reduce_sum(unreduced(y, p) * mask) / tf.reduce_sum(mask)


def _relative(model, x, y, p):
    """Relates each sample's loss to those of all samples."""
    each = _per_sample(y, p)
    return each / tf.sqrt(1 + tf.reduce_mean(each**2))


def _conditional(model, x, y, p):
    total, mean = 0.1 * tf.reduce_sum(p**2), tf.reduce_mean((y - p) ** 2)
    return tf.cond(total > mean, lambda: total, lambda: tf.sqrt(mean))


def _dice(model, x, y, p):
    both = tf.reduce_sum(y * y) + tf.reduce_sum(p * p)
    return 1 - 2 * tf.reduce_sum(y * p) / both


def _clip(model, x, y, p):
    """Compares each prediction with the inputs of all samples."""
    left = tf.nn.l2_normalize(p, 1)
    right = tf.nn.l2_normalize(x[:, :3], 1)
    logits = tf.matmul(left, right, transpose_b=True) * tf.exp(model.scale)
    labels = tf.range(tf.shape(left)[0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def _simclr(model, x, y, p):
    """Compares both views of all samples with each other."""
    z = tf.nn.l2_normalize(tf.concat([p, model(x * 1.1)], 0), 1)
    count = tf.shape(z)[0]
    logits = 2 * z @ tf.transpose(z) - 1e9 * tf.eye(count)
    half = tf.range(count // 2)
    labels = tf.concat([half + count // 2, half], 0)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def _barlow_twins(model, x, y, p):
    """Correlates features over all samples."""

    def normalized(z):
        deviation = tf.math.reduce_std(z, 0) + 0.5
        return (z - tf.reduce_mean(z, 0)) / deviation

    other = model(x * 1.1 + 0.1)
    products = tf.transpose(normalized(p)) @ normalized(other)
    correlation = products / tf.cast(tf.shape(p)[0], tf.float32)
    # The weights that the mean takes out would have gradients of rounding.
    return tf.reduce_sum((correlation - tf.eye(3)) ** 2) + tf.reduce_mean(p**2)


def _beside_a_mean(join):
    """Joins each prediction with the mean of all."""

    def loss(model, x, y, p):
        mean = tf.reduce_mean(p, 0, keepdims=True)
        both = join(p - y, tf.tile(mean, [tf.shape(p)[0], 1]))
        return tf.reduce_mean(tf.reduce_prod(both, 1))

    return loss


def _chosen_by_place(model, x, y, p):
    """Takes one entry of each prediction, as of an action."""
    chosen = tf.argmax(y, 1, output_type=tf.int32)
    places = tf.stack([tf.range(tf.shape(p)[0]), chosen], 1)
    return tf.reduce_mean((tf.gather_nd(p, places) - 1) ** 2)


def _scan_over_a_mask(model, x, y, p):
    """Goes over features, some of which count, as over steps of sequences."""
    steps = tf.transpose(tf.reshape(tf.reshape(p, [-1]), [-1, 3]))
    masks = tf.transpose(y > 0)
    states = tf.scan(
        lambda state, step: tf.where(step[1], tf.tanh(state) + step[0], state),
        (steps[1:], masks[1:]),
        initializer=steps[0],
    )
    return tf.reduce_mean(states[-1] ** 2)


def _fold_over_weights(model, x, y, p):
    return tf.foldl(
        lambda state, weight: tf.tanh(state * weight),
        model.dense.bias + 1.2,
        initializer=tf.reduce_mean((y - p) ** 2),
    )


def _fold_over_samples_and_their_mean(model, x, y, p):
    """Goes over features of samples beside those of all."""
    centered = p - tf.reduce_mean(p, 0)
    states = tf.foldl(
        lambda state, step: tf.tanh(state + step[0] - 0.5 * step[1]),
        (tf.transpose(centered), tf.transpose(p)),
        initializer=y[:, 0],
    )
    return tf.reduce_mean(states**2)


def _by_frequency(model, x, y, p):
    """Weights samples by how many of their kind there are."""
    kinds = tf.cast(y[:, 0] > 0, tf.int32)
    counts = tf.math.bincount(kinds, minlength=2, maxlength=2, dtype=p.dtype)
    return _per_sample(y, p) / tf.gather(counts, kinds)


def _by_frequency_of_weights(model, x, y, p):
    kinds = tf.cast(y[:, 0] > 0, tf.int32)
    weights = tf.abs(x[:, 0])
    counts = tf.math.bincount(kinds, weights, minlength=2, maxlength=2)
    return _per_sample(y, p) / (1 + tf.gather(counts, kinds))


def _ranks(scores):
    places = tf.argsort(tf.argsort(scores))
    return tf.cast(places, scores.dtype) / tf.cast(
        tf.size(scores), scores.dtype
    )


@tf.custom_gradient
def _ranks_with_a_slope(scores):
    """Differentiates ranks by comparing them with those of moved scores."""

    def gradient(upstream):
        return -(_ranks(scores) - _ranks(scores + 20 * upstream)) / 2

    return _ranks(scores), gradient


def _correlation_of_ranks(model, x, y, p):
    products = _ranks(y[:, 0]) * _ranks_with_a_slope(p[:, 0])
    return tf.reduce_mean((y - p) ** 2) - tf.reduce_mean(products)


@tf.custom_gradient
def _normalized_by_a_part(x):
    return tf.identity(x), lambda d: d / (tf.norm(d) + 1e-3)


@tf.custom_gradient
def _mean_clipped_by_a_norm(y, p):
    def gradient(upstream):
        slope = upstream * 2 * (p - y) / tf.cast(tf.size(p), p.dtype)
        return None, tf.clip_by_norm(slope, 0.1)

    return tf.reduce_mean((y - p) ** 2), gradient


@tf.custom_gradient
def _largest_softly(scores):
    def gradient(upstream):
        return upstream * tf.nn.softmax(scores)

    return tf.reduce_logsumexp(scores), gradient


@tf.custom_gradient
def _deviation_of(y, p):
    error = p - y
    deviation = tf.math.reduce_std(error)

    def gradient(upstream):
        count = tf.cast(tf.size(p), p.dtype)
        centered = error - tf.reduce_mean(error)
        return None, upstream * centered / (count * deviation)

    return deviation, gradient


def _of_chosen(loss, weighs=False):
    """Calls a loss of Keras for some of the samples."""

    def of_some(model, x, y, p):
        mask = y[:, 0] > 0.2
        given = [tf.boolean_mask(y, mask), tf.boolean_mask(p, mask)]
        return loss(*given, *([tf.abs(given[0][:, 0])] if weighs else []))

    return of_some


class OfPositive(keras.losses.Loss):
    def call(self, y, p):
        return tf.boolean_mask(tf.square(y - p), y > 0)


LOSSES = {
    "Keras loss of chosen samples": _of_chosen(keras.losses.MeanSquaredError()),
    "Keras loss of chosen samples, with weights": _of_chosen(
        keras.losses.Huber(), weighs=True
    ),
    "Keras loss that drops samples": lambda model, x, y, p: OfPositive()(y, p),
    "by frequency": _by_frequency,
    "by frequency of weights": _by_frequency_of_weights,
    "correlation of ranks": _correlation_of_ranks,
    "gradient of one's own": lambda model, x, y, p: (
        tf.reduce_mean((y - p) ** 2) + _largest_softly(p[:, 0])
    ),
    "gradient of one's own for a deviation": lambda model, x, y, p: (
        _deviation_of(y, p)
    ),
    "mean behind a normalized slope": lambda model, x, y, p: tf.reduce_mean(
        (y - _normalized_by_a_part(p)) ** 2
    ),
    "rows behind a normalized slope": lambda model, x, y, p: (
        (y - _normalized_by_a_part(p)) ** 2
    ),
    "mean with a clipped slope": lambda model, x, y, p: _mean_clipped_by_a_norm(
        y, p
    ),
    "mean of silu": lambda model, x, y, p: tf.reduce_mean(tf.nn.silu(y - p)),
    "silu of a mean": lambda model, x, y, p: tf.nn.silu(
        tf.reduce_mean((y - p) ** 2)
    ),
    "scan over a mask": _scan_over_a_mask,
    "fold over weights": _fold_over_weights,
    "fold over samples and their mean": _fold_over_samples_and_their_mean,
    "beside a mean, joined": _beside_a_mean(lambda a, b: tf.concat([a, b], 1)),
    "beside a mean, stacked": _beside_a_mean(lambda a, b: tf.stack([a, b], 1)),
    "softmax over the batch": lambda model, x, y, p: (
        tf.reduce_mean(p**2) - tf.reduce_sum(y * tf.nn.log_softmax(p, 0))
    ),
    "numbers of a constant seed": lambda model, x, y, p: tf.reduce_mean(
        (p + tf.random.stateless_uniform(tf.shape(p), [1, 2]) - y) ** 2
    ),
    "chosen by place": _chosen_by_place,
    "mean": lambda model, x, y, p: tf.reduce_mean((y - p) ** 2),
    "mean of an unreduced loss": lambda model, x, y, p: tf.reduce_mean(
        unreduced(y, p)
    ),
    "masked mean": _masked_mean,
    "mean of chosen samples": lambda model, x, y, p: tf.reduce_mean(
        tf.boolean_mask(unreduced(y, p), y[:, 0] > 0)
    ),
    "unreduced loss": lambda model, x, y, p: unreduced(y, p),
    "one value per sample": lambda model, x, y, p: _per_sample(y, p),
    "sum": lambda model, x, y, p: 0.1 * tf.reduce_sum((y - p) ** 2),
    "sum over a constant": lambda model, x, y, p: (
        tf.reduce_sum(unreduced(y, p)) / 16.0
    ),
    "sum over the batch size": lambda model, x, y, p: (
        tf.reduce_sum(unreduced(y, p)) / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "sum of parts of the batch size": lambda model, x, y, p: tf.reduce_sum(
        unreduced(y, p) / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "average over a global batch size": lambda model, x, y, p: (
        tf.nn.compute_average_loss(_per_sample(y, p), global_batch_size=6)
    ),
    "average of TensorFlow": lambda model, x, y, p: (
        tf.nn.compute_average_loss(_per_sample(y, p))
        + tf.nn.scale_regularization_loss(
            0.3 * tf.nn.l2_loss(model.dense.kernel)
        )
    ),
    "product with compared samples": lambda model, x, y, p: tf.tensordot(
        tf.nn.softmax(tf.tanh(p[:, 0]), 0), y[:, 0], 1
    ),
    "mean and sum": lambda model, x, y, p: (
        ops.mean((y - p) ** 2) + 0.1 * ops.sum(p)
    ),
    "mean and regularizer": lambda model, x, y, p: (
        tf.reduce_mean((y - p) ** 2)
        + 0.3 * tf.reduce_sum(model.dense.kernel**2)
    ),
    "sum and regularizer": lambda model, x, y, p: (
        0.1 * tf.reduce_sum((y - p) ** 2)
        + 0.3 * tf.reduce_sum(model.dense.kernel**2)
    ),
    "root of a mean": lambda model, x, y, p: tf.sqrt(
        tf.reduce_mean((y - p) ** 2)
    ),
    "ratio of sums": _dice,
    "largest losses": lambda model, x, y, p: tf.reduce_mean(
        tf.math.top_k(_per_sample(y, p), k=2)[0]
    ),
    "mean and maximum": lambda model, x, y, p: (
        tf.reduce_mean((y - p) ** 2) + 0.1 * tf.reduce_max(p)
    ),
    "contrastive of two kinds": _clip,
    "contrastive of two views": _simclr,
    "correlations": _barlow_twins,
    "mean in a tf.function": lambda model, x, y, p: _mean_in_a_function(y, p),
    "sum in a tf.function": lambda model, x, y, p: _sum_in_a_function(y, p),
    "root in a tf.function": lambda model, x, y, p: _root_in_a_function(y, p),
    "values relative to all": _relative,
    "sum or root by a condition": _conditional,
}
if ON_GPU:  # TensorFlow counts weights by XLA alone there
    del LOSSES["by frequency of weights"]


def _clipped(gradients):
    return tf.clip_by_global_norm(gradients, 0.05)[0]


def _normalized(gradients):
    return [each / (tf.norm(each) + 1e-3) for each in gradients]


GRADIENTS = {"clipped": _clipped, "normalized": _normalized}


class OwnStep(keras.Model):
    """Trains with a loss, and returns numbers of many kinds."""

    def __init__(self, loss, change=list):
        super().__init__()
        self.dense = layers.Dense(3)
        self.loss_of, self.change = loss, change
        self.mean = keras.metrics.Mean(name="mean")
        self.weighted = keras.metrics.Mean(name="weighted")

    def build(self, shape):
        self.dense.build(shape)
        self.scale = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.mean, self.weighted]

    def gradients(self, x, y):
        """Returns the loss, and gradients with what they belong to."""
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y, self(x, training=True))
        found = tape.gradient(loss, self.trainable_variables)
        pairs = [
            (gradient, variable)
            for gradient, variable in zip(
                found, self.trainable_variables, strict=True
            )
            if gradient is not None
        ]
        return loss, *zip(*pairs, strict=True)

    def train_step(self, data):
        x, y = data
        loss, gradients, variables = self.gradients(x, y)
        changed = self.change(list(gradients))
        self.optimizer.apply_gradients(zip(changed, variables, strict=True))
        self.mean.update_state(loss)
        self.weighted.update_state(loss, sample_weight=tf.shape(x)[0])
        return {
            "loss": self.mean.result(),
            "weighted": self.weighted.result(),
            "percent": 100 * self.mean.result(),
            "of the batch": tf.reduce_sum(loss),
            "norm": tf.linalg.global_norm(gradients),
            "samples": tf.shape(x)[0],
        }


def train(make, count, **compile_options):
    """Trains what `make` returns, and returns it with its history."""
    keras.utils.set_random_seed(1)
    model = make()
    model.build((None, 6))
    options = {"optimizer": keras.optimizers.SGD(0.05), "jit_compile": False}
    model.compile(**(options | compile_options))
    if count:
        kc.replicate(model, count)
    history = model.fit(X, Y, **FIT)
    if count:
        kc.assert_in_sync(model)
    return model, history


def assert_equal(make, count=MANY, jit_compile=False, **compile_options):
    one, one_history = train(make, None, **compile_options)
    compile_options["jit_compile"] = jit_compile
    many, many_history = train(make, count, **compile_options)
    assert_same_training(one, many, one_history, many_history)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss(loss):
    assert_equal(lambda: OwnStep(LOSSES[loss]))


# XLA does not know how many samples are chosen, nor how many kinds are counted,
# and has numbers of its own for a seed.
NOT_COMPILED = (
    "numbers of a constant seed",
    "mean of chosen samples",
    "by frequency",
    "by frequency of weights",
)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "loss", [name for name in LOSSES if name not in NOT_COMPILED]
)
def test_compiled_loss(loss):
    count = MANY if ON_GPU else 1
    assert_equal(lambda: OwnStep(LOSSES[loss]), count, jit_compile=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", GRADIENTS)
@pytest.mark.parametrize("loss", ["mean", "one value per sample", "sum"])
def test_gradients_that_are_changed_before_apply(loss, change):
    assert_equal(lambda: OwnStep(LOSSES[loss], GRADIENTS[change]))


class ByHand(OwnStep):
    """Computes its gradients without a tape."""

    def gradients(self, x, y):
        error = self(x) - y
        slope = 2 * error / tf.cast(tf.size(error), tf.float32)
        pairs = (
            (tf.matmul(x, slope, transpose_a=True), self.dense.kernel),
            (tf.reduce_sum(slope, 0), self.dense.bias),
        )
        return tf.reduce_mean(error**2), *zip(*pairs, strict=True)


class Seeded(OwnStep):
    """Gives its tape the slopes of a loss by predictions."""

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            squares = tf.reduce_mean(p**2)
        targets, seeds = self.loss_of(p, squares, p - y)
        found = tape.gradient(
            targets, self.dense.trainable_variables, output_gradients=seeds
        )
        return squares, found, self.dense.trainable_variables


SEEDS = {
    "over the batch size": lambda p, squares, error: (
        p,
        2 * error / tf.cast(tf.shape(error)[0], error.dtype),
    ),
    "over all entries": lambda p, squares, error: (
        p,
        2 * error / tf.cast(tf.size(error), error.dtype),
    ),
    "of samples": lambda p, squares, error: (p, 0.1 * error),
    "over a deviation": lambda p, squares, error: (
        p,
        0.1 * error / tf.math.reduce_std(error),
    ),
    "clipped by a norm": lambda p, squares, error: (
        p,
        tf.clip_by_norm(error, 0.5),
    ),
    "over a sum": lambda p, squares, error: (
        p,
        error / tf.reduce_sum(tf.abs(error)),
    ),
    "of a mean": lambda p, squares, error: (
        squares,
        tf.reduce_max(tf.abs(error)),
    ),
    "of several targets": lambda p, squares, error: (
        [p, squares],
        [error / tf.norm(error), tf.constant(0.3)],
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_output_gradients(seed):
    assert_equal(lambda: Seeded(SEEDS[seed]))


def test_gradients_by_hand():
    assert_equal(lambda: ByHand(None))


class Accumulating(OwnStep):
    """Adds up the gradients of two batches before it applies them."""

    def build(self, shape):
        super().build(shape)
        self.kept = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in (self.dense.kernel, self.dense.bias)
        ]
        self.seen = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def train_step(self, data):
        loss, gradients, _ = self.gradients(*data)
        variables = [self.dense.kernel, self.dense.bias]
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign_add(gradient)
        self.seen.assign_add(1)

        def update():
            grads = [kept.value / 2 for kept in self.kept]
            self.optimizer.apply(grads, variables)
            for kept in self.kept:
                kept.assign(ops.zeros_like(kept))
            return 0

        tf.cond(tf.equal(self.seen.value % 2, 0), update, lambda: 0)
        return {"loss": loss}


def test_gradients_that_a_step_accumulates():
    assert_equal(lambda: Accumulating(LOSSES["mean"]))


@pytest.mark.long
def test_optimizer_that_accumulates_in_a_step_of_ones_own():
    optimizer = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1}
    models = []
    for count in (None, MANY):
        model, history = train(
            lambda: OwnStep(LOSSES["mean"], _normalized),
            count,
            optimizer=keras.optimizers.SGD(0.05, **optimizer),
        )
        models.append((model, history))
    (one, one_history), (many, many_history) = models
    # One device makes accumulators only for what has gradients.
    for expected, got in zip(
        one.get_weights(), many.get_weights(), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        many_history.history["loss"], one_history.history["loss"], rtol=1e-5
    )


class Penalty(OwnStep):
    """Adds the norm of the gradient with respect to the inputs."""

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = tf.tanh(self(x))
                mean = tf.reduce_mean((p - y) ** 2)
            slope = inner.gradient(mean, x)
            norms = tf.reduce_sum(slope**2, 1)
            loss = mean + 10.0 * tf.reduce_sum(norms)
        variables = [self.dense.kernel, self.dense.bias]
        return loss, tape.gradient(loss, variables), variables


def test_gradient_of_a_gradient():
    assert_equal(lambda: Penalty(None))


class LazyPenalty(OwnStep):
    """Penalizes large gradients in every other step, as StyleGAN2 does."""

    def __init__(self, reduce, writes=False):
        super().__init__(None)
        self.reduce, self.writes = reduce, writes
        self.steps = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.taken = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def penalty(self, x):
        with tf.GradientTape() as inner:
            inner.watch(x)
            out = tf.reduce_sum(tf.tanh(self.dense(x)))
        norms = tf.reduce_sum(inner.gradient(out, x) ** 2, 1)
        if self.writes:
            self.taken.assign(self.taken + 0.5)
            norms *= self.taken
        return self.reduce(norms)

    def gradients(self, x, y):
        variables = [self.dense.kernel, self.dense.bias]
        with tf.GradientTape() as tape:
            error = tf.reduce_mean((self.dense(x) - y) ** 2)
            loss = error + tf.cond(
                self.steps % 2 == 0, lambda: self.penalty(x), lambda: 0.0
            )
        self.steps.assign_add(1)
        return loss, tape.gradient(loss, variables), variables


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("reduce", [tf.reduce_mean, tf.reduce_sum])
def test_lazy_penalty(reduce, writes):
    assert_equal(lambda: LazyPenalty(reduce, writes))


class Adapting(OwnStep):
    """Differentiates a loss after a step of gradient descent, as MAML does."""

    def gradients(self, x, y):
        kernel, bias = self.dense.kernel, self.dense.bias
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                before = tf.reduce_mean((x @ kernel + bias - y) ** 2)
            inside = inner.gradient(before, [kernel, bias])
            fast = [
                v - 0.1 * g for v, g in zip((kernel, bias), inside, strict=True)
            ]
            loss = tf.reduce_mean((x @ fast[0] + fast[1] - 2 * y) ** 2)
        return loss, tape.gradient(loss, [kernel, bias]), [kernel, bias]


def test_gradient_through_an_update():
    assert_equal(lambda: Adapting(None))


class AddsLoss(layers.Layer):
    """Adds a loss of any form, as a CTC endpoint does."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: ops.sum(x**2, -1),
        lambda x: ops.mean(x**2),
        lambda x: 0.1 * ops.sum(x**2),
        lambda x: ops.sqrt(ops.mean(x**2)),
    ],
    ids=["per sample", "mean", "sum", "root"],
)
def test_added_loss(loss):
    def make():
        return keras.Sequential([layers.Dense(3), AddsLoss(loss)])

    assert_equal(make, loss="mse")


def _contrast(y, p):
    logits = ops.matmul(p, ops.transpose(y))
    return ops.categorical_crossentropy(
        ops.eye(ops.shape(p)[0]), logits, from_logits=True
    )


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss",
    [
        _contrast,
        lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)),
        lambda y, p: ops.sum((y - p) ** 2),
        keras.losses.MeanSquaredError(reduction=None),
        keras.losses.Dice(),
        keras.losses.Tversky(),
    ],
    ids=["contrastive", "root", "sum", "unreduced", "Dice", "Tversky"],
)
def test_compiled_with_a_loss_over_the_batch(loss):
    def make():
        return keras.Sequential([layers.Dense(3, "sigmoid")])

    assert_equal(make, loss=loss)


# What a step keeps in variables.


def _codebook(layer, x):
    chosen = ops.one_hot(ops.argmax(x, -1), 6)
    layer.kept.assign(0.9 * layer.kept + 0.1 * ops.transpose(x) @ chosen)


def _queue(layer, x):
    left = 6 - ops.shape(x)[0]
    layer.kept.assign(ops.concatenate([x, layer.kept[:left]], 0))


def _sum_by_assign(layer, x):
    layer.kept.assign(layer.kept + ops.sum(x, 0))


def _mean_by_add(layer, x):
    layer.kept.assign_add(ops.broadcast_to(ops.mean(x, 0), (6, 6)))


def _added_and_reset(layer, x):
    layer.steps.assign_add(1)
    layer.kept.assign_add(ops.broadcast_to(ops.sum(x, 0), (6, 6)))
    reset = ops.equal(layer.steps % 2, 0)
    layer.kept.assign(ops.where(reset, 0.0, layer.kept.value))


def _largest(layer, x):
    layer.kept.assign(ops.maximum(layer.kept, ops.max(x, 0)))


def _covariance(layer, x):
    layer.kept.assign(ops.transpose(x) @ x / ops.cast(ops.shape(x)[0], x.dtype))


def _by_condition(layer, x):
    mean = ops.broadcast_to(ops.mean(x, 0), (6, 6))
    layer.kept.assign(tf.cond(mean[0, 0] > 0, lambda: mean, lambda: -2 * mean))


def _set_in_a_branch(layer, x):
    spread = ops.std(x, 0)

    def first():
        layer.kept.assign(ops.log(ops.std(x, 0)) * ops.ones((6, 6)) + spread)
        layer.steps.assign(ops.shape(x)[0])

    tf.cond(layer.kept[0, 0] > 0.9, first, lambda: None)


def _added_in_a_branch(layer, x):
    def add():
        layer.kept.assign_add(ops.broadcast_to(ops.mean(x, 0), (6, 6)))
        layer.steps.assign_add(1)

    tf.cond(layer.steps < 3, add, lambda: None)


def _used_after_a_branch(layer, x):
    mean = tf.tile(ops.mean(x, 0, keepdims=True), [6, 1])
    tf.cond(
        layer.steps < 3, lambda: layer.kept.assign(mean), lambda: layer.kept
    )
    layer.steps.assign_add(1)
    layer.add_loss(ops.sum(layer.kept**2))
    layer.kept.assign(layer.kept**2)


def _set_in_a_function(layer, x):
    @tf.function
    def function(x):
        def largest():
            layer.kept.assign(ops.maximum(layer.kept, ops.max(x, 0)))

        tf.cond(layer.kept[0, 0] > -9.0, largest, lambda: None)

    function(x)


def _counted(layer, x):
    layer.steps.assign(layer.steps + ops.shape(x)[0])


class Keeping(layers.Layer):
    def __init__(self, update):
        super().__init__()
        self.update = update

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(6, 6), initializer="ones", trainable=False
        )
        self.steps = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.update(self, x)
        return x


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "update",
    [
        _codebook,
        _queue,
        _sum_by_assign,
        _mean_by_add,
        _added_and_reset,
        _largest,
        _covariance,
        _by_condition,
        _set_in_a_branch,
        _added_in_a_branch,
        _set_in_a_function,
        _used_after_a_branch,
        _counted,
    ],
)
def test_state(update):
    def make():
        return keras.Sequential([Keeping(update), layers.Dense(3)])

    assert_equal(make, loss="mse")


# What metrics and logs are.


class OfMeans(keras.metrics.Metric):
    """The mean over batches of a mean over the batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.mean((y - p) ** 2))
        self.count.assign_add(1)

    def result(self):
        return self.total / self.count


class OfRoots(OfMeans):
    """The mean over batches of the root of a mean over the batch."""

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.sqrt(ops.mean((y - p) ** 2)))
        self.count.assign_add(1)


class Spread(keras.metrics.Metric):
    """The variance of all predictions, from means that move."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = self.add_weight(initializer="zeros", name="count")
        self.mean = self.add_weight(initializer="zeros", name="mean")
        self.squares = self.add_weight(initializer="zeros", name="squares")

    def update_state(self, y, p, sample_weight=None):
        new = ops.cast(ops.size(p), "float32")
        count = self.count + new
        shift = ops.mean(p) - self.mean
        within = ops.sum((p - ops.mean(p)) ** 2)
        self.squares.assign_add(within + shift**2 * self.count * new / count)
        self.mean.assign_add(shift * new / count)
        self.count.assign(count)

    def result(self):
        return self.squares / self.count


class Largest(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.largest = self.add_weight(initializer="zeros", name="largest")

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max((y - p) ** 2)))

    def result(self):
        return ops.sqrt(self.largest)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("metric", [OfMeans, OfRoots, Spread, Largest])
def test_metric_of_batches(metric):
    def make():
        return keras.Sequential([layers.Dense(3)])

    def metrics():
        return [metric(name="of batches")]

    one, one_history = train(make, None, loss="mse", metrics=metrics())
    many, many_history = train(make, MANY, loss="mse", metrics=metrics())
    assert_same_training(one, many, one_history, many_history)


class LogsOfVariables(OwnStep):
    """Returns a variable itself, which Keras takes for its value."""

    def train_step(self, data):
        return super().train_step(data) | {"scale": self.scale}


@pytest.mark.long
def test_logs_of_variables():
    assert_equal(lambda: LogsOfVariables(_clip))


class BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({key: np.asarray(logs[key]) for key in logs})


class OwnLogs(OwnStep):
    """Returns a value under a metric's name, and values per sample."""

    def train_step(self, data):
        loss, gradients, variables = self.gradients(*data)
        self.optimizer.apply(gradients, variables)
        self.mean.update_state(loss)
        each = self(data[0])[:, 0]
        return {
            "mean": loss,
            "each": each,
            "centered": each - tf.reduce_mean(each),
            "shared": tf.tensordot(tf.nn.softmax(each, 0), each, 1),
        }


class RenamedLogs(OwnStep):
    """Returns a metric's result under another name, from a `tf.function`."""

    @tf.function
    def train_step(self, data):
        loss, gradients, variables = self.gradients(*data)
        self.optimizer.apply(gradients, variables)
        self.mean.update_state(loss)
        return {"error": self.mean.result()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [OwnLogs, RenamedLogs])
def test_logs(kind):
    seen = []
    for count in (None, MANY):
        keras.utils.set_random_seed(1)
        model = kind(LOSSES["mean"])
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.05), jit_compile=False)
        if count:
            kc.replicate(model, count)
        logs = BatchLogs()
        model.fit(X, Y, callbacks=[logs], **FIT)
        seen.append(logs.seen)
    for expected, got in zip(*seen, strict=True):
        assert expected.keys() == got.keys()
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5)


def _of_code(model, x, y, p):
    """A sum that the graph does not show."""
    error = tf.py_function(lambda z: z + 0.0, [(y - p) ** 2], tf.float32)
    return tf.reduce_sum(tf.reshape(error, [-1]))


def _of_code_in_a_branch(model, x, y, p):
    return tf.cond(
        model.dense.bias[0] < 1e9,
        lambda: _of_code(model, x, y, p),
        lambda: 0.0,
    )


def _of_code_by_a_sum(model, x, y, p):
    """A ratio of sums, one of which the graph does not show."""
    return _of_code(model, x, y, p) / tf.reduce_sum(tf.abs(y))


def _of_code_by_a_number(model, x, y, p):
    return _of_code(model, x, y, p) / 10.0


@several
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "loss",
    [_of_code, _of_code_in_a_branch, _of_code_by_a_sum, _of_code_by_a_number],
)
def test_what_the_graph_does_not_show_warns(loss):
    with pytest.warns(kc.ConfluxWarning, match="a sum or a mean over samples"):
        train(lambda: OwnStep(loss), MANY)


@tf.function
def _silu_in_a_function(y, p):
    return tf.nn.silu(tf.reduce_mean((y - p) ** 2))


def _silu_in_a_loop(y, p):
    """Goes on with a mean, by steps that have their own gradients."""
    return tf.foldl(
        lambda state, step: tf.nn.silu(state) + step,
        tf.constant([0.3, 0.2]),
        initializer=tf.reduce_mean((y - p) ** 2),
    )


@several
@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [_silu_in_a_function, _silu_in_a_loop])
def test_ones_own_gradient_inside_of_an_operation_warns(loss):
    with pytest.warns(kc.ConfluxWarning, match="replicas cannot reproduce"):
        train(lambda: OwnStep(lambda model, x, y, p: loss(y, p)), MANY)


@several
def test_a_compiled_loss_whose_own_gradient_mixes_samples_warns():
    def loss(y, p):
        return (y - _normalized_by_a_part(p)) ** 2

    def make():
        return keras.Sequential([keras.Input((6,)), layers.Dense(3)])

    with pytest.warns(kc.ConfluxWarning, match="replicas cannot reproduce"):
        train(make, MANY, loss=loss)


def _of_code_as_a_slope(p, squares, error):
    return p, error * _of_code(None, None, p, error)


@several
def test_output_gradients_that_the_graph_does_not_show_warn():
    with pytest.warns(kc.ConfluxWarning, match="replicas cannot reproduce"):
        train(lambda: Seeded(_of_code_as_a_slope), MANY)


class LogsOfCode(OwnStep):
    """Returns a sum that the graph does not show."""

    def train_step(self, data):
        total = _of_code(self, *data, self(data[0]))
        return super().train_step(data) | {"total": total}


@several
def test_logs_that_the_graph_does_not_show_warn():
    with pytest.warns(kc.ConfluxWarning, match=r"show how \['total'\]"):
        train(lambda: LogsOfCode(LOSSES["mean"]), MANY)


class Detector(keras.Model):
    """Maps a function of code over the samples, as encoders of boxes do."""

    def __init__(self):
        super().__init__()
        self.net = keras.layers.Dense(1)
        self.net.build((None, 8))

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        found = tf.numpy_function(np.sign, [y], tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x) - y) ** 2 * found)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {
            "loss": loss,
            "half": loss / 2,
            "positives": tf.reduce_sum(found),
        }


@several
def test_logs_beside_a_loss_that_the_graph_does_not_show_warn():
    x, y = regression(16)
    model = Detector()
    model.compile("sgd", jit_compile=False)
    kc.replicate(model, MANY)
    with pytest.warns(kc.ConfluxWarning) as caught:
        model.fit(x, y, batch_size=16, verbose=0)
    told = [str(each.message) for each in caught]
    (of_loss,) = [each for each in told if "a GradientTape" in each]
    (of_log,) = [each for each in told if "which the step returns" in each]
    assert "['positives']" in of_log, of_loss


class Capacity(keras.layers.Layer):
    """Drops samples beyond the first ones, as a mixture of experts does."""

    def call(self, x):
        chosen = keras.ops.cast(x > 0, x.dtype)
        places = keras.ops.cumsum(chosen, axis=0)
        room = keras.ops.cast(keras.ops.shape(x)[0], x.dtype) / 4
        return x * keras.ops.cast(places <= room, x.dtype)


class Adaptive(keras.layers.Layer):
    """Goes on in steps that the largest value of the batch decides."""

    def call(self, x):
        def step(time, x):
            size = 1 / (2 + tf.reduce_max(tf.abs(x)))
            return time + size, x * (1 - size)

        return tf.while_loop(lambda time, _: time < 1, step, (0.0, x))[1]


class PerSample(keras.layers.Layer):
    """Divides by the number of samples."""

    def call(self, x):
        return x / keras.ops.cast(keras.ops.shape(x)[0], x.dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Capacity, PerSample])
def test_a_layer_may_mix_samples(kind):
    dense = keras.layers.Dense

    def make():
        return keras.Sequential(
            [keras.Input((6,)), dense(4), kind(), kind(), dense(3)]
        )

    assert_equal(make, loss="mse")


class InPython(keras.layers.Layer):
    """Mixes samples in Python, which cannot be computed once more."""

    def call(self, x):
        mixed = tf.numpy_function(lambda x: x - x.mean(0), [x], x.dtype)
        return tf.ensure_shape(mixed, x.shape)


class InFunction(keras.layers.Layer):
    """Calls a layer that mixes samples in a function."""

    def __init__(self, name):
        super().__init__()
        self.inner = Capacity(name=name)

    def call(self, x):
        return tf.function(self.inner)(x)


@several
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [InPython, Adaptive, InFunction])
def test_what_mixes_samples_and_cannot_be_computed_once_more_warns(kind):
    body = [keras.layers.Dense(4), kind(name="mixing")]
    model = keras.Sequential([keras.Input((6,)), *body, keras.layers.Dense(3)])
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, MANY)
    with pytest.warns(kc.ConfluxWarning, match="'mixing' for a sample depends"):
        model.fit(X, Y, **FIT)


@tf.custom_gradient
def _normalized_by_all(x):
    def gradient(upstream):
        squares = kc.allreduce("sum", tf.reduce_sum(upstream**2))
        return upstream / (tf.sqrt(squares) + 1e-3)

    return tf.identity(x), gradient


class Slopes(keras.layers.Layer):
    """Changes what flows back through it."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


class Back(OwnStep):
    """Has a layer that changes what flows back."""

    def __init__(self, function):
        super().__init__(LOSSES["mean"])
        self.back = Slopes(function, name="back")

    def call(self, x):
        return self.back(self.dense(x)) * 2.0


@several
def test_a_layer_whose_own_gradient_mixes_samples_warns():
    with pytest.warns(
        kc.ConfluxWarning, match="gradient that the layer 'back'"
    ):
        train(lambda: Back(_normalized_by_a_part), MANY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "function", [_normalized_by_all, tf.nn.silu], ids=["all", "silu"]
)
def test_a_layer_with_a_gradient_of_its_own(function):
    one = _normalized_by_a_part if function is _normalized_by_all else function
    first, first_history = train(lambda: Back(one), None)
    many, many_history = train(lambda: Back(function), MANY)
    assert_same_training(first, many, first_history, many_history)


class Between(OwnStep):
    """Changes what flows back from one layer to another, in its step."""

    def __init__(self, function):
        super().__init__(
            lambda model, x, y, p: tf.reduce_mean(
                (y - model.last(function(p))) ** 2
            )
        )
        self.last = layers.Dense(3)

    def build(self, shape):
        super().build(shape)
        self.last.build((None, 3))


class Recomputed(OwnStep):
    """Has a layer that runs another one again when it differentiates."""

    def __init__(self):
        super().__init__(LOSSES["mean"])
        self.back = Slopes(tf.recompute_grad(self.dense))

    def call(self, x):
        return self.back(x)


class RecomputedBlock(OwnStep):
    """Runs layers of sequences again when it differentiates."""

    def __init__(self, *blocks):
        super().__init__(LOSSES["mean"])
        self.first, *self.others = blocks
        self.slopes = Slopes(tf.recompute_grad(self.block))
        self.scale = self.add_weight(shape=(3,), initializer="ones")

    def build(self, shape):
        super().build(shape)
        self.block(tf.zeros((2, 2, 3)))

    def block(self, x):
        outputs = x * self.scale + self.first(x)
        for each in self.others:
            outputs = each(outputs)
        return outputs

    def call(self, x):
        outputs = self.slopes(tf.reshape(x, (-1, 2, 3)))
        return self.dense(tf.reshape(outputs, (-1, 6)))


@several
def test_a_step_whose_own_gradient_mixes_samples_warns():
    with pytest.warns(kc.ConfluxWarning, match="gradient that the step"):
        train(lambda: Between(_normalized_by_a_part), MANY)


@pytest.mark.sampled(1)
def test_a_step_whose_own_gradient_keeps_samples_apart():
    assert_equal(lambda: Between(tf.nn.silu))


@pytest.mark.parametrize(
    "make",
    [
        Recomputed,
        lambda: Between(tf.recompute_grad(tf.tanh)),
        lambda: RecomputedBlock(layers.Dense(3, "gelu")),
        lambda: RecomputedBlock(layers.LSTM(3, return_sequences=True)),
        lambda: RecomputedBlock(
            layers.EinsumDense("abc,cd->abd", (2, 3), activation="relu"),
            layers.LayerNormalization(),
        ),
    ],
    ids=["in a layer", "in a step", "dense", "recurrent", "normalized"],
)
def test_a_layer_that_is_recomputed(make):
    assert_equal(make)


class MakesLayers(keras.Model):
    """Makes a layer that mixes samples in each trace of its step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = InPython(), InPython()
        self.net = keras.layers.Dense(1)

    def call(self, x):
        return self.net(self.second(self.first(x) + 1) + 1)

    def train_step(self, data):
        x, y = data
        return super().train_step((InPython()(x) + 1, y))


@several
def test_layers_that_mix_samples_warn_once_each():
    x, y = regression(22)
    model = MakesLayers()
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, MANY)
    with pytest.warns(kc.ConfluxWarning) as caught:
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    told = [str(each.message) for each in caught]
    told = [each for each in told if "for a sample depends" in each]
    assert len(told) == len(set(told)) == 3


def _for_each(model, x, y, gradients):
    """Returns the losses after a step that each sample takes alone."""

    def of_one(sample):
        x, y = sample
        kernel = model.dense.kernel.value
        (slope,) = gradients(lambda k: tf.reduce_sum((x @ k - y) ** 2), kernel)
        return tf.reduce_sum((x @ (kernel - 0.01 * slope) - y) ** 2)

    return tf.vectorized_map(of_one, (x[:, None], y[:, None]))


def _by_tape(loss, kernel):
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        value = loss(kernel)
    return tape.gradient(value, [kernel])


def _by_graph(loss, kernel):
    return tf.gradients(loss(kernel), [kernel])


def _tasks(model, x, y, p):
    return 0.1 * ops.mean(_for_each(model, x, y, _by_graph)) + ops.mean(p**2)


def _tasks_by_tape(model, x, y, p):
    return 0.1 * ops.mean(_for_each(model, x, y, _by_tape)) + ops.mean(p**2)


@pytest.mark.long
def test_a_tape_in_a_loop_says_what_to_write():
    """And what it says is equal to one device."""
    with pytest.raises(NotImplementedError, match=r"write `tf.gradients\("):
        train(lambda: OwnStep(_tasks_by_tape), MANY)
    assert_equal(lambda: OwnStep(_tasks))


def _by_a_hidden_condition(loss, update):
    total = tf.py_function(lambda z: z + 0.0, [loss], tf.float32)
    tf.cond(tf.reshape(total, []) < 1e9, update, lambda: None)


def _in_a_loop(loss, update):
    tf.while_loop(lambda i: i < 2, lambda i: (update(), i + 1)[1:], [0])


def _in_a_branch_of_a_function(loss, update):
    tf.function(lambda x: tf.cond(x < 1e9, update, lambda: None))(loss)


class Cautious(OwnStep):
    """Updates where replicas may not all come to.

    Args:
        where: Called with the loss and a function that updates.
    """

    def __init__(self, where):
        super().__init__(None)
        self.where = where

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x) - y) ** 2)
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.where(loss, lambda: self.optimizer.apply(gradients, weights))
        return {"loss": loss}


@several
@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", [_by_a_hidden_condition, _in_a_loop])
def test_an_update_that_replicas_may_not_share_warns(where):
    with pytest.warns(kc.ConfluxWarning, match="applies the optimizer 'sgd"):
        train(lambda: Cautious(where), MANY)


def test_an_update_in_a_branch_of_a_function():
    assert_equal(lambda: Cautious(_in_a_branch_of_a_function), MANY)


class OfRagged(keras.Model):
    """Fills ragged samples up to a length, and compares them in the loss."""

    def __init__(self, length, in_branch=False):
        super().__init__()
        self.length = length
        self.in_branch = in_branch
        self.scale = self.add_weight(shape=(1,), initializer="ones")

    def means(self, samples):
        """Of each sample with what is filled up."""
        filled = samples.to_tensor(-1.0, shape=(None, self.length))
        kept = tf.sequence_mask(samples.row_lengths(), self.length)
        return tf.reduce_mean(tf.where(kept, tf.tanh(filled), -0.5), 1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            samples = data * self.scale
            if self.in_branch:
                branch = functools.partial(self.means, samples)
                means = tf.cond(tf.shape(self.scale)[0] > 0, branch, branch)
            else:
                means = self.means(samples)
            loss = tf.sqrt(tf.reduce_mean(means[:, None] * means[None]))
        gradients = tape.gradient(loss, [self.scale])
        self.optimizer.apply_gradients(
            zip(gradients, [self.scale], strict=True)
        )
        return {"loss": loss}


def train_on_ragged(length, count, in_branch=False):
    model = OfRagged(length, in_branch)
    model.compile(keras.optimizers.SGD(0.5), jit_compile=False)
    if count:
        kc.replicate(model, count)
    lengths = np.random.default_rng(0).integers(1, 6, 22)
    values = np.random.default_rng(1).uniform(size=lengths.sum())
    samples = tf.RaggedTensor.from_row_lengths(np.float32(values), lengths)
    data = tf.data.Dataset.from_tensor_slices(samples).batch(6)
    return model.fit(data, epochs=2, verbose=0).history["loss"]


@pytest.mark.long
@pytest.mark.parametrize("length", [5, None])
def test_ragged_samples_that_are_filled_up(length):
    np.testing.assert_allclose(
        train_on_ragged(length, MANY), train_on_ragged(length, None), rtol=1e-5
    )


@pytest.mark.long
def test_texts_are_filled_up_to_the_longest_of_the_batch():
    to_words = keras.layers.TextVectorization(vocabulary=["a", "b", "c"])
    texts = tf.constant([*"abcabcabc", "a b c a b c a", "b b"] * 2)

    def trained(count):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((), dtype="string")
        vectors = keras.layers.Embedding(6, 4)(to_words(inputs))
        means = keras.layers.GlobalAveragePooling1D()(vectors)
        model = keras.Model(inputs, keras.layers.Dense(1)(means))
        model.compile("sgd", "mse")
        if count:
            kc.replicate(model, count)
        numbers = tf.range(22.0)[:, None]
        data = tf.data.Dataset.from_tensor_slices((texts, numbers)).batch(6)
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        return losses, model.evaluate(data), model.predict(data, verbose=0)

    for each, alone in zip(trained(MANY), trained(None), strict=True):
        np.testing.assert_allclose(each, alone, rtol=1e-5)


@pytest.mark.long
@several
def test_samples_that_are_filled_up_in_a_branch_warn():
    with pytest.warns(kc.ConfluxWarning) as warned:
        train_on_ragged(None, 2, in_branch=True)
    messages = "".join(str(each.message) for each in warned)
    assert "to_tensor()` in a branch or a loop" in messages
    assert "sequence_mask` in a branch or a loop" in messages


def test_connectionist_temporal_classification_of_sequences():
    """Its loops fill tensors that TensorFlow makes without a value."""
    x = np.random.default_rng(0).normal(size=(16, 8, 3))
    y = np.random.default_rng(1).integers(1, 5, size=(16, 3))
    fit = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}

    def trained(count):
        keras.utils.set_random_seed(1)
        words = keras.layers.GRU(4, return_sequences=True)
        model = keras.Sequential([words, keras.layers.Dense(5)])
        model.compile("sgd", keras.losses.CTC(), jit_compile=False)
        if count:
            kc.replicate(model, count)
        return model, model.fit(x, y, **fit)

    (one, alone), (many, together) = trained(None), trained(MANY)
    assert_same_training(one, many, alone, together)
