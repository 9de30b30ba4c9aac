"""Random numbers are those of one device."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from conftest import RUN_LONG_TESTS
from keras import layers
from keras import ops
from keras import random
from models import assert_same_training

import keras_conflux as kc
from keras_conflux._communication.communicator import Communicator
from keras_conflux._compat import error_texts
from keras_conflux._compat.private_tensorflow_names import DRAWS
from keras_conflux._fit.numerics import random_operations
from keras_conflux._fit.numerics.random_operations import Sampler

pytestmark = pytest.mark.skipif(MANY < 3, reason="needs three devices")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 5)).astype("float32")
SERIES = RNG.normal(size=(13, 6, 4)).astype("float32")
IMAGES = RNG.uniform(size=(13, 8, 8, 3)).astype("float32")
Y = RNG.normal(size=(13, 1)).astype("float32")


class Draw(layers.Layer):
    """Calls a function with its inputs and a seed generator, in training."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function
        self.generator = random.SeedGenerator(7)

    def call(self, x, training=False):
        return self.function(x, self.generator) if training else x

    def compute_output_shape(self, shape):
        return shape


class NoisyCell(layers.Layer):
    """Adds noise to its state in each step."""

    def __init__(self):
        super().__init__()
        self.state_size = 3
        self.dense = layers.Dense(3)
        self.generator = random.SeedGenerator(3)

    def call(self, x, states):
        (state,) = states
        noise = random.normal(ops.shape(state), seed=self.generator)
        kept = random.dropout(state, 0.3, seed=self.generator)
        state = ops.tanh(self.dense(x) + kept + 0.1 * noise)
        return state, [state]


def sequential(*inside):
    return keras.Sequential([*inside, layers.Flatten(), layers.Dense(1)])


def draw(function):
    return lambda: sequential(layers.Dense(7), Draw(function), layers.Dense(3))


class Sample(layers.Layer):
    """Draws what a VAE decodes."""

    def __init__(self):
        super().__init__()
        self.generator = random.SeedGenerator(7)

    def call(self, mean, spread):
        noise = random.normal(ops.shape(mean), seed=self.generator)
        return mean + ops.exp(spread) * noise


def vae():
    inputs = keras.Input((5,))
    mean, spread = layers.Dense(3)(inputs), layers.Dense(3)(inputs)
    return keras.Model(inputs, layers.Dense(1)(Sample()(mean, spread)))


def attention():
    inputs = keras.Input((6, 4))
    y = layers.MultiHeadAttention(2, 3, dropout=0.3, seed=1, use_bias=False)(
        inputs, inputs
    )
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(y)))


def shared():
    """Two layers draw from one generator."""
    one, two = Draw(_noise), Draw(_noise)
    two.generator = one.generator
    return sequential(layers.Dense(4), one, layers.Dense(4), two)


def inside_function():
    class Model(keras.Sequential):
        @tf.function
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training=training, mask=mask)

    return Model(
        [
            layers.Dense(8),
            layers.Dropout(0.4, seed=1),
            layers.Dense(7),
            layers.Dropout(0.4, seed=2),
            layers.Dense(1),
        ]
    )


def _noise(x, seed):
    return x + random.normal(ops.shape(x), seed=seed)


def _time_major(x, seed):
    x = ops.transpose(ops.reshape(x, (-1, 7, 1)), (1, 0, 2))
    x = random.dropout(x, 0.4, seed=seed)
    return ops.reshape(ops.transpose(x, (1, 0, 2)), (-1, 7))


def _rows_of_samples(x, seed):
    x = ops.reshape(ops.repeat(x, 3, 1), (-1, 7))
    x = random.dropout(x, 0.4, seed=seed)
    x = x + random.normal(ops.shape(x), seed=seed)
    return ops.mean(ops.reshape(x, (-1, 3, 7)), 1)


def _two_views(x, seed):
    both = ops.concatenate([x, -x], 0)
    both = random.dropout(both, 0.4, seed=seed)
    both = both + random.uniform(ops.shape(both), seed=seed)
    one, two = ops.split(both, 2)
    return one + 2 * two


def _views_of_two_lengths(x, seed):
    twice = ops.concatenate([x, -x], 0)
    all_ = random.dropout(ops.concatenate([x, twice], 0), 0.4, seed=seed)
    n = ops.shape(x)[0]
    return all_[:n] + 2 * all_[n : 2 * n] + 3 * all_[2 * n :]


def _twice_as_many(x, seed):
    return random.normal((2 * ops.shape(x)[0], 7), seed=seed)


def _grouped(x):
    return ops.sum(ops.reshape(ops.tanh(x), (-1, 2, 7)), 1)


def _several_of_each(x, seed):
    n = ops.shape(x)[0]
    flat = ops.reshape(random.uniform((n * 7,), seed=seed), (-1, 7))
    pairs = random.normal((3, n + n), seed=seed)
    pairs = ops.sum(ops.reshape(pairs, (3, -1, 2)), (0, 2))
    repeated = ops.repeat(x, 2, 0) + _twice_as_many(x, seed)
    around = random.normal((n * 2, 7), ops.repeat(x, 2, 0), seed=seed)
    beside = ops.concatenate([ops.repeat(x, 2, 0), _twice_as_many(x, seed)], 1)
    first = (beside[:, :7] * ops.flip(beside[:, 7:], 1))[::2]
    first += _twice_as_many(x, seed)[::2]
    return flat * pairs[:, None] + _grouped(repeated) + _grouped(around) + first


def _two_of_each_or_two_batches(x, seed):
    n = ops.shape(x)[0]
    one, two = ops.split(_twice_as_many(x, seed), 2)
    grouped = _grouped(_twice_as_many(x, seed))
    both = _twice_as_many(x, seed)
    again = ops.reshape(_twice_as_many(x, seed), (2, -1, 7))
    joined = ops.concatenate([_twice_as_many(x, seed), ops.repeat(x, 2, 0)], 0)
    drawn = joined[:n] - joined[n : 2 * n]
    return x + one + 2 * two * grouped + both[n:] - both[:n] + again[1] + drawn


def _grouped_elsewhere(x, seed):
    drawn = tf.function(lambda x: _twice_as_many(x, seed))(x)
    grouped = tf.function(_grouped)(_twice_as_many(x, seed))
    inside = tf.function(lambda x: _grouped(_twice_as_many(x, seed)))(x)
    return x + _grouped(drawn) + 2 * grouped + 3 * inside


def _drop_path(x, seed):
    kept = random.uniform((ops.shape(x)[0], 1), seed=seed) < 0.6
    return x * ops.cast(kept, x.dtype)


def _in_a_loop(x, seed):
    return ops.fori_loop(0, 3, lambda i, x: _noise(x, seed), x)


def _in_a_branch(x, seed):
    return ops.cond(
        ops.max(ops.ones(3)) > 0,
        lambda: random.dropout(x, 0.4, seed=seed),
        lambda: x,
    )


def _others(x, seed):
    shape, alike = ops.shape(x), ops.zeros((1, 9))
    drawn = [
        random.truncated_normal(shape, mean=x, seed=seed),
        random.randint(shape, 0, 9, seed=seed),
        random.randint(shape, 0, 9, dtype="uint8", seed=seed),
        random.uniform(shape, -1.0, 3.0, seed=seed),
        random.gamma(shape, 2.0, seed=seed),
        random.gamma(shape, ops.exp(x), seed=seed),
        random.beta(shape, 2.0, 3.0, seed=seed),
        random.binomial(shape, 9.0, 0.5, seed=seed),
        random.categorical(x, 7, seed=seed),
        ops.transpose(random.categorical(alike, shape[0], seed=seed)),
    ]
    return x + sum(ops.cast(each, x.dtype) for each in drawn)


def _in_dtypes(x, seed):
    for dtype in ("float16", "bfloat16", "float64"):
        noise = random.normal(ops.shape(x), dtype=dtype, seed=seed)
        kept = random.dropout(ops.cast(x, dtype), 0.2, seed=seed)
        x = ops.cast(noise + kept, x.dtype)
    return x


def _shared_by_all(x, seed):
    vector = random.normal((7,), seed=seed)
    columns = random.dropout(x, 0.4, noise_shape=(1, 7), seed=seed)
    order = random.shuffle(ops.arange(7), seed=seed)
    return columns * vector + ops.take(x, order, 1) * random.uniform(
        (), seed=seed
    )


def _of_what_a_function_takes(x, seed):
    noisy = tf.function(lambda x: _noise(x, seed), autograph=False)
    return noisy(2 * ops.concatenate([x, x], 1))[:, :7]


def _in_a_compiled_function(x, seed):
    @tf.function(jit_compile=True)
    def noisy():
        y = random.dropout(_noise(x, seed), 0.3, seed=seed)
        return y + random.truncated_normal(ops.shape(y), seed=seed)

    return noisy()


def _centered(x):
    return x - ops.mean(x, axis=0, keepdims=True)


def _of_all(x, seed):
    kept = random.dropout(_centered(x), 0.3, seed=seed)
    return 2 * kept + random.dropout(
        tf.roll(x, 1, 0), 0.3, noise_shape=(None, 1), seed=seed
    )


class Gan(keras.Model):
    """A step of one's own, with noise of latents, labels and places between."""

    def __init__(self):
        super().__init__()
        self.generator = layers.Dense(5)
        self.critic = sequential(layers.Dense(7), layers.Dropout(0.3, seed=1))
        self.seed = random.SeedGenerator(5)

    def call(self, x):
        return self.critic(self.generator(x[:, :3]))

    def train_step(self, data):
        x, _ = data
        count = ops.shape(x)[0]
        latent = random.normal((count, 3), seed=self.seed)
        with tf.GradientTape() as tape:
            fake = self.generator(latent)
            share = random.uniform((count, 1), seed=self.seed)
            between = self.critic(x + share * (fake - x), training=True)
            both = self.critic(ops.concatenate([fake, x], 0), training=True)
            labels = [ops.ones((count, 1)), ops.zeros((count, 1))]
            labels = ops.concatenate(labels, 0)
            labels += 0.1 * random.uniform(ops.shape(labels), seed=self.seed)
            loss = ops.mean((both - labels) ** 2) + ops.mean(between**2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


MODELS = {
    "dropout": lambda: sequential(
        layers.Dense(8),
        layers.Dropout(0.4),
        layers.Dense(7),
        layers.Dropout(0.4),
    ),
    "noise": lambda: sequential(
        layers.GaussianNoise(0.3),
        layers.Dense(6),
        layers.GaussianDropout(0.3),
        layers.AlphaDropout(0.3),
    ),
    "spatial dropout": lambda: sequential(
        layers.Conv1D(5, 2), layers.SpatialDropout1D(0.4)
    ),
    "dropout of rows": lambda: sequential(
        layers.Conv1D(5, 2), layers.Dropout(0.4, noise_shape=(None, 1, None))
    ),
    "LSTM": lambda: sequential(
        layers.LSTM(5, dropout=0.3, recurrent_dropout=0.3, seed=1),
    ),
    "cells": lambda: sequential(
        layers.RNN(
            layers.StackedRNNCells(
                [layers.GRUCell(5, dropout=0.3), layers.LSTMCell(4)]
            )
        )
    ),
    "noise in a cell": lambda: sequential(layers.RNN(NoisyCell())),
    "attention": attention,
    "augmentation": lambda: sequential(
        layers.RandomFlip(),
        layers.RandomTranslation(0.2, 0.2),
        layers.RandomRotation(0.1),
        layers.RandomZoom(0.2),
        layers.RandomContrast(0.2),
        layers.RandomBrightness(0.2, value_range=(0, 1)),
        layers.SpatialDropout2D(0.3),
    ),
    "vae": vae,
    "a shared generator": shared,
    "a function": inside_function,
    "time major": draw(_time_major),
    "rows of samples": draw(_rows_of_samples),
    "two views": draw(_two_views),
    "views of two lengths": draw(_views_of_two_lengths),
    "several rows of each sample": draw(_several_of_each),
    "two rows or two batches": draw(_two_of_each_or_two_batches),
    "rows that are grouped elsewhere": draw(_grouped_elsewhere),
    "drop path": draw(_drop_path),
    "no seed": draw(lambda x, seed: random.dropout(x, 0.3)),
    "an integer": draw(lambda x, seed: random.dropout(x, 0.3, seed=3)),
    "of what a function takes": draw(_of_what_a_function_takes),
    "in a loop": draw(_in_a_loop),
    "in a branch": draw(_in_a_branch),
    "in a compiled function": draw(_in_a_compiled_function),
    "a step": Gan,
    "other functions": draw(_others),
    "in dtypes": draw(_in_dtypes),
    "shared by all samples": draw(_shared_by_all),
    "dropout of what is of all samples": draw(_of_all),
    "an integer in a loop over samples": draw(
        lambda x, seed: ops.map(
            lambda row: row * random.normal((7,), seed=3), x
        )
    ),
}


def inputs_of(name):
    if name in ("spatial dropout", "dropout of rows", "LSTM", "cells"):
        return SERIES
    if name in ("noise in a cell", "attention"):
        return SERIES
    return IMAGES if name == "augmentation" else X


def trained(name, count, compiled=False, **fit):
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    x = inputs_of(name)
    model(x[:1])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=compiled)
    if count:
        kc.replicate(model, count)
    options = {"epochs": 2, "batch_size": 4, "shuffle": False, "verbose": 0}
    logs = model.fit(x, Y, **options | fit)
    return model, logs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_draws_as_one_device_does(name):
    """On uneven replicas, in CI on 3; the last batch has one sample."""
    one, one_logs = trained(name, None)
    for count in (2, 3) if RUN_LONG_TESTS else (3,):
        many, many_logs = trained(name, count)
        assert_same_training(one, many, one_logs, many_logs, rtol=2e-5)
        kc.assert_in_sync(many)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "dropout",
        "noise",
        "LSTM",
        "augmentation",
        "a function",
        "a step",
        "shared by all samples",
        "an integer in a loop over samples",
    ],
)
def test_batches_that_are_not_compiled_draw_as_xla(name):
    """All on several CPU devices, and the last one of one replica."""
    one, one_logs = trained(name, None, compiled=True)
    for count in (1, 2, 3) if RUN_LONG_TESTS else (1, 3):
        many, many_logs = trained(name, count, compiled=True)
        assert_same_training(one, many, one_logs, many_logs, rtol=2e-5)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="there XLA compiles the model as well")
def test_where_xla_cannot_draw_tensorflow_does(monkeypatch):
    def refused(operation):
        raise error_texts.cannot_compile(f"XLA has not got {operation}.")

    one, one_logs = trained("dropout", None)
    monkeypatch.setattr(random_operations, "_any_arguments", refused)
    random_operations._program.cache_clear()
    many, many_logs = trained("dropout", 3, compiled=True)
    random_operations._program.cache_clear()
    assert_same_training(one, many, one_logs, many_logs, rtol=2e-5)


def states(model):
    """Returns the states of all seed generators."""
    return [v.numpy() for v in model.variables if "seed" in v.path]


@pytest.mark.long
def test_what_is_left_of_generators_is_that_of_one_device():
    one, many = (trained("augmentation", count)[0] for count in (None, 3))
    assert states(one)
    np.testing.assert_array_equal(states(one), states(many))


def gone_on(name, counts):
    """Trains on one device, and goes on with other devices and batches."""
    model, _ = trained(name, counts[0])
    for count, size in zip(counts[1:], (5, 13), strict=True):
        if count:
            kc.replicate(kc.unreplicate(model), count)
        x = inputs_of(name)
        model.fit(x, Y, epochs=2, batch_size=size, verbose=0, shuffle=False)
    return model


@pytest.mark.long
def test_a_training_goes_on_with_the_numbers_of_one_device():
    expected = gone_on("dropout", [None, None, None])
    for counts in ([None, 2, 3], [3, None, 2]):
        got = gone_on("dropout", counts)
        assert_same_training(expected, got, rtol=2e-5)


@pytest.mark.long
def test_a_function_that_is_traced_already_draws_for_each_step():
    """TensorFlow keeps the trace, in which a step may leave nothing."""

    def gone_on(count):
        model, _ = trained("a function", count)
        for size in (5, 13):
            model.compile("sgd", "mse", jit_compile=False)  # traces again
            model.fit(X, Y, batch_size=size, verbose=0, shuffle=False)
            model.evaluate(X, Y, batch_size=size, verbose=0)
        return model

    assert_same_training(gone_on(None), gone_on(3), rtol=2e-5)


def test_a_first_fit_in_the_scope_of_a_strategy_draws_the_same():
    """Where a variable that is made gets copies."""

    def in_a_scope(count):
        strategy = kc.replicate(devices=[f"CPU:{i}" for i in range(count)])
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((X.shape[1],)), layers.Dropout(0.5, seed=3)]
            )
            model.add(layers.Dense(1, kernel_initializer="ones"))
            model.compile("sgd", "mse", jit_compile=False)
            model.fit(X, Y, batch_size=5, verbose=0, shuffle=False)
        return model.get_weights()

    for one, other in zip(in_a_scope(1), in_a_scope(2), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


class Draws(layers.Layer):
    """Draws for each of its inputs, also in predictions."""

    def __init__(self, draws):
        super().__init__()
        self.draws = draws
        self.generator = random.SeedGenerator(7)

    def call(self, x):
        return {
            name: ops.cast(draw(x, self.generator), x.dtype)
            for name, draw in self.draws.items()
        }

    def compute_output_shape(self, shape):
        return dict.fromkeys(self.draws, shape)


COMPILED = {
    "uniform": lambda x, s: random.uniform(ops.shape(x), seed=s),
    "normal": lambda x, s: random.normal(ops.shape(x), mean=x, seed=s),
    "truncated": lambda x, s: random.truncated_normal(ops.shape(x), seed=s),
    "randint": lambda x, s: random.randint(ops.shape(x), 0, 99, seed=s),
    "dropout": lambda x, s: random.dropout(x, 0.5, seed=s),
    "half": lambda x, s: random.normal(ops.shape(x), dtype="float16", seed=s),
    "integer": lambda x, s: random.normal(ops.shape(x), seed=3),
    "columns": lambda x, s: x * random.normal((x.shape[1],), seed=s),
    "categorical": lambda x, s: random.categorical(x, x.shape[1], seed=s),
    "views": _two_views,
    "several rows": lambda x, s: ops.reshape(
        random.normal((ops.shape(x)[0] * 2, x.shape[1]), seed=s),
        (-1, 2, x.shape[1]),
    )[:, 1],
    "no seed": lambda x, s: random.uniform(ops.shape(x)),
}


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [7, 8])
def test_a_compiled_step_draws_what_one_compiled_device_does(
    monkeypatch, width
):
    monkeypatch.setattr(Communicator, "supports_xla", True)
    x = RNG.normal(size=(12, width)).astype("float32")
    found = []
    for devices in (None, 2, 3) if RUN_LONG_TESTS else (None, 3):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((width,)), Draws(COMPILED)])
        model.compile(jit_compile=True)
        if devices:
            kc.replicate(model, devices)
        model.predict(x, batch_size=6, verbose=0)  # builds the model
        found.append(model.predict(x, batch_size=6, verbose=0))
    one, *several = found
    for many in several:
        for name in COMPILED:
            np.testing.assert_allclose(
                many[name], one[name], rtol=1e-6, err_msg=name
            )


def drawn_alone():
    """Yields each dtype and shape; XLA compiles each of them once in CI."""
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    shapes = [(13, 7), (13, 8), (13,), (6, 3, 5)]
    for rows, dtype in itertools.product(shapes, dtypes):
        yield rows, dtype, False
        is_long = shapes.index(rows) != dtypes.index(dtype) and not ON_GPU
        marks = [pytest.mark.long] * is_long
        yield pytest.param(rows, dtype, True, marks=marks)


def samplers(seed, dtype):
    """Returns a sampler of each operation that draws rows alone."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    algorithm = tf.random.Algorithm.AUTO_SELECT.value
    begin = {"key": key, "counter": counter, "alg": algorithm}
    *floats, integers, _ = (getattr(x.owner, x.attribute) for x in DRAWS)
    limits = {tf.int32: (3, 1000), tf.int64: (-(2**40), 2**40)}
    return [
        *(Sampler(x, {**begin, "dtype": tf.as_dtype(dtype)}) for x in floats),
        *(
            Sampler(
                integers,
                {
                    **begin,
                    "minval": tf.constant(low, kind),
                    "maxval": tf.constant(high, kind),
                },
            )
            for kind, (low, high) in limits.items()
        ),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rows", "dtype", "compiled"), [*drawn_alone()])
def test_rows_are_drawn_alone_bit_by_bit(dtype, rows, compiled):
    begins = [0, 1, 5, 6]

    def drawn():
        found = []
        for sampler in samplers([12345, 678], dtype):
            if not sampler.is_counted:
                continue
            whole = sampler.whole(rows)
            for begin in begins:
                shape = tf.constant([rows[0] - begin, *rows[1:]])
                begin = tf.constant(begin, tf.uint64)
                part = sampler.rows([begin], [shape], rows[1:])
                found.append((whole, part))
        return found

    pairs = tf.function(drawn, jit_compile=compiled)()
    assert len(pairs) == len(begins) * (5 - compiled)
    for whole, part in pairs:
        expected = whole[whole.shape[0] - part.shape[0] :]
        np.testing.assert_array_equal(part, expected)


def test_rows_beyond_2_to_the_32_are_counted_exactly():
    sampler, *_ = samplers([1, 2], "float32")
    for begin, width in ((2**33, 8), (2**33 + 1, 7)):
        one, next_one = (
            sampler.rows(
                [tf.constant(begin + skipped, tf.uint64)],
                [tf.constant([2 - skipped, width])],
                [width],
            )
            for skipped in (0, 1)
        )
        np.testing.assert_array_equal(one[1:], next_one)
        assert not np.array_equal(one[:1], next_one)


def warned(function, data=X, **compiled):
    """Returns what a step warns of that calls a function, and its numbers."""
    model = sequential(Draw(function, name="own"))
    model(data[:1])
    model.compile("sgd", "mse", jit_compile=False, **compiled)
    kc.replicate(model, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, Y[: len(data)], batch_size=4, verbose=0)
    kc.assert_in_sync(model)
    texts = [
        (str(each.message), each.filename)
        for each in caught
        if issubclass(each.category, kc.ConfluxWarning)
    ]
    assert all(file == __file__ for _, file in texts)
    return {text for text, _ in texts}  # the same on both replicas


NOT_SHOWN = {
    "map": lambda x, s: ops.map(lambda row: _noise(row, s), x),
    "vectorized_map": lambda x, s: ops.vectorized_map(
        lambda row: _noise(row, s), x
    ),
    "a loop until": lambda x, s: tf.while_loop(
        lambda x: ops.max(x) < 1, lambda x: (_noise(x, s) + 1,), (x,)
    )[0],
    "rows that are chosen": lambda x, s: (
        x + ops.sum(_noise(tf.boolean_mask(x, x[:, 0] > 0), s)) * 0
    ),
    "positions of samples": lambda x, s: (
        x
        + 0
        * ops.cast(
            random.randint(ops.shape(x), 0, ops.shape(x)[0], seed=s), x.dtype
        )
    ),
    "each with each": lambda x, s: (
        x + ops.mean(_noise(x @ ops.transpose(x), s)) * 0
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NOT_SHOWN)
def test_what_the_graph_does_not_show_warns(name):
    texts = warned(NOT_SHOWN[name])
    drawn = [text for text in texts if "keras.random." in text]
    kind = "randint" if name == "positions of samples" else "normal"
    assert len(drawn) == 1, texts
    assert f"`keras.random.{kind}` draws in" in drawn[0]
    assert "own" in drawn[0]


OF_ALL_SAMPLES = {
    "means": lambda x, s: random.normal(ops.shape(x), _centered(x), seed=s),
    "a deviation": lambda x, s: (
        x + random.normal(ops.shape(x), 0.0, ops.std(x), seed=s)
    ),
    "a mean": lambda x, s: x + random.normal(ops.shape(x), ops.mean(x), seed=s),
    "a limit": lambda x, s: (
        x + random.uniform(ops.shape(x), 0.0, ops.max(x, 0), seed=s)
    ),
    "a gamma": lambda x, s: (
        x + random.gamma(ops.shape(x), ops.exp(_centered(x)), seed=s)
    ),
    "categories": lambda x, s: (
        x + ops.cast(random.categorical(_centered(x), 5, seed=s), "float32")
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OF_ALL_SAMPLES)
def test_what_is_drawn_by_what_all_samples_make_warns(name):
    (text,) = warned(OF_ALL_SAMPLES[name])
    assert "output of the layer 'own' for a sample depends on other" in text


def _in_a_function(x, seed):
    return tf.function(lambda x: x * tf.random.uniform([]))(x)


def _of_a_function(x, seed):
    return x * tf.function(lambda: tf.random.uniform([]))()


def _given_to_a_function(x, seed):
    times = tf.function(lambda x, share: x * share)
    return times(x, tf.random.uniform([]))


def _mixed_up(x, seed):
    share = ops.maximum(tf.random.uniform([]), 0.5)
    return share * x + (1 - share) * x**2


def _seed(seed):
    return tf.random.uniform([2], maxval=99, dtype="int32")


SHARED_BY_SAMPLES = {
    "a share": lambda x, s: x * tf.random.uniform([]),
    "features": lambda x, s: x + tf.random.normal([5]),
    "a stateless draw": lambda x, s: (
        x + tf.random.stateless_normal([], _seed(s))
    ),
    "mixed up": _mixed_up,
    "a projection": lambda x, s: x @ tf.random.truncated_normal([5, 5]),
    "an order": lambda x, s: tf.gather(
        x, tf.random.shuffle(tf.range(5)), axis=1
    ),
    "a gamma": lambda x, s: x + tf.random.gamma([5], 1.0),
    "filled": lambda x, s: x * tf.fill(tf.shape(x), tf.random.uniform([])),
    "tiled": lambda x, s: (
        x + tf.tile(tf.random.normal([1, 5]), [tf.shape(x)[0], 1])
    ),
    "a choice": lambda x, s: tf.where(tf.random.uniform([]) < 0.5, x, -x),
    "a condition": lambda x, s: tf.cond(
        tf.random.uniform([]) < 0.5, lambda: x, lambda: -x
    ),
    "in a branch": lambda x, s: tf.cond(
        ops.max(ops.ones(3)) > 0, lambda: x * tf.random.uniform([]), lambda: x
    ),
    "in a loop": lambda x, s: ops.fori_loop(
        0, 3, lambda i, x: x * tf.random.uniform([]), x
    ),
    "in a function": _in_a_function,
    "of a function": _of_a_function,
    "given to a function": _given_to_a_function,
    "a crop": lambda x, s: (
        tf.image.random_crop(x, (tf.shape(x)[0], 3)) @ ops.ones((3, 5))
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SHARED_BY_SAMPLES)
def test_what_samples_share_and_each_replica_draws_warns(name):
    (text,) = warned(SHARED_BY_SAMPLES[name])
    assert (
        "the samples of a batch share the numbers that the operation 'Random"
        in text
        or ("'TruncatedNormal'" in text)
    )
    assert "`keras.random.SeedGenerator`" in text


OF_EACH_SAMPLE = {
    "rows": lambda x, s: x + tf.random.normal(tf.shape(x)),
    "one each": lambda x, s: x * tf.random.uniform([tf.shape(x)[0], 1]),
    "dropout": lambda x, s: tf.nn.dropout(x, 0.5),
    "in a function": lambda x, s: tf.function(lambda x: tf.nn.dropout(x, 0.5))(
        x
    ),
    "map": lambda x, s: tf.map_fn(lambda row: row * tf.random.uniform([]), x),
    "vectorized_map": lambda x, s: tf.vectorized_map(
        lambda row: row * tf.random.uniform([]), x
    ),
    "a seed": lambda x, s: (
        x + tf.random.stateless_normal(tf.shape(x), _seed(s))
    ),
    "a size": lambda x, s: x * tf.cast(tf.size(tf.random.normal([3])), x.dtype),
    "shared": lambda x, s: x * random.uniform((), seed=s),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OF_EACH_SAMPLE)
def test_draws_for_each_sample_do_not_warn(name):
    assert not warned(OF_EACH_SAMPLE[name])


class Noisy(keras.Sequential):
    """Draws what leaves its step, where it is replica 0's."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)
            loss = loss * tf.random.uniform([]) + ops.sqrt(loss)
            loss = tf.cond(
                tf.random.uniform([]) < 0.5, lambda: loss, lambda: 2 * loss
            )
        weights = self.trainable_variables
        gradients = [
            gradient + tf.random.normal(weight.shape)
            for gradient, weight in zip(
                tape.gradient(loss, weights), weights, strict=True
            )
        ]
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, "drawn": tf.random.uniform([])}


def test_draws_that_leave_a_step_do_not_warn():
    model = Noisy([keras.Input((5,)), layers.Dense(4), layers.Dense(1)])
    model.compile("sgd", jit_compile=False)
    kc.replicate(model, 2)
    model.fit(X, Y, batch_size=5, verbose=0)  # warnings are errors
    kc.assert_in_sync(model)


def test_a_seed_that_a_step_takes_warns():
    def own(x, generator):
        seed = ops.cast(generator.next(), "int32")
        return x + tf.random.stateless_normal(ops.shape(x), seed)

    assert any("a `SeedGenerator` by itself" in text for text in warned(own))


def test_replicas_draw_apart_what_is_not_known_to_be_of_one_device():
    """In a loop over samples, and by TensorFlow's own functions."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = random.SeedGenerator(7)

        def call(self, x):
            by_row = ops.map(
                lambda row: random.uniform((5,), seed=self.generator), x
            )
            return ops.concatenate([by_row, tf.random.uniform(ops.shape(x))], 1)

    model = Model()
    kc.replicate(model, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = model.predict(X[:8], verbose=0)
    assert len(np.unique(drawn)) == drawn.size
