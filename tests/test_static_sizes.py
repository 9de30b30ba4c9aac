"""Steps that know the number of their samples while they are traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from models import assert_same_training

import keras_conflux as kc

pytestmark = pytest.mark.skipif(MANY < 3, reason="needs three devices")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.normal(size=(24, 1)).astype("float32")


def both(build, data, count, **fit):
    """Trains one model on a device and one on several."""
    models = []
    for replicas in (None, count):
        keras.utils.set_random_seed(1)
        model = build()
        if replicas:
            kc.replicate(model, replicas)
        model.fit(*data, verbose=0, **fit)
        models.append(model)
    kc.assert_in_sync(models[1])
    return models


def whole_batches(size):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return (data.batch(size, drop_remainder=True),), {}


def arrays(size):
    return (X, Y), {"batch_size": size, "shuffle": False}


def _mean(p, y):
    return tf.reduce_sum((p - y) ** 2) / (p.shape[0] * 1.0)


def _reshaped(p, y):
    return tf.reduce_mean((tf.reshape(p, (y.shape[0], 1)) - y) ** 2)


def _squeezed(p, y):
    y = keras.ops.expand_dims(keras.ops.squeeze(y), -1)
    return tf.reduce_mean((p - y) ** 2)


class OwnStep(keras.Model):
    """Has a loss that needs the number of samples while it is traced."""

    def __init__(self, loss):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.own_loss = loss

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(self(x, training=True), y)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("data", [whole_batches, arrays])
@pytest.mark.parametrize("loss", [_mean, _reshaped, _squeezed])
def test_a_step_that_needs_the_number_of_samples(loss, data):
    def build():
        model = OwnStep(loss)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    given, options = data(6)
    with pytest.warns(kc.ConfluxWarning, match="own_step.*x.shape.0.*with -1"):
        models = both(build, given, 3, epochs=2, **options)
    assert_same_training(*models)


class Reshapes(keras.layers.Layer):
    def call(self, x):
        return tf.reshape(x, x.shape)


def _contrast(y, p):
    apart = 1 - tf.eye(p.shape[0])
    return tf.reduce_mean(tf.nn.softplus(p @ tf.transpose(p)) * apart)


@pytest.mark.filterwarnings("ignore:.*any number of samples")
@pytest.mark.parametrize(
    "call",
    ["predict", "train_on_batch", "test_on_batch", "predict_on_batch"],
)
def test_all_calls_trace_for_the_number_of_samples(call):
    """No more than `fit`, whose data tell how large their batches are."""
    data = (X[:6],) if call.startswith("predict") else (X[:6], Y[:6])
    results = []
    for replicas in (None, 3):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([Reshapes(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        if replicas:
            kc.replicate(model, replicas)
        results.append(getattr(model, call)(*data))
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_a_batch_that_does_not_divide_says_what_to_write():
    class Divides(keras.layers.Layer):
        def call(self, x):
            return x / (1.0 * x.shape[0])

    model = keras.Sequential([Divides(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError) as caught:
        kc.replicate(model, 3).train_on_batch(X[:7], Y[:7])
    assert "3, 2, 2 of 7 samples" in caught.value.__notes__[0]


class Picks(keras.layers.Layer):
    """Adds a sample that only the whole batch has."""

    def __init__(self, checks=False):
        super().__init__()
        self._checks = checks

    def call(self, x):
        picked = tf.gather(x, [4])
        if self._checks:
            tf.debugging.assert_greater(picked, -1e6)
        return x + picked


def with_picks(**options):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    picks = Picks(**options)
    model = keras.Sequential([dense(4, use_bias=False), picks, dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="GPUs give zeros for places out of bounds")
def test_samples_that_a_replica_lacks_are_those_of_others():
    one, many = with_picks(), kc.replicate(with_picks(), 3)
    for model in (one, many):
        for _ in range(2):
            model.train_on_batch(X[:5], Y[:5])
    for expected, got in zip(
        one.get_weights(), many.get_weights(), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*depends on other samples")
@pytest.mark.skipif(ON_GPU, reason="GPUs give zeros for places out of bounds")
def test_samples_that_a_replica_lacks_say_what_to_write():
    model = kc.replicate(with_picks(checks=True), 3)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.train_on_batch(X[:5], Y[:5])
    assert "`keras_conflux.allgather(x)`" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("loss", "layers", "named"),
    [
        (_contrast, [], "the loss _contrast"),
        ("dice", [Reshapes(name="reshapes")], "reshapes, the loss dice"),
    ],
)
def test_a_loss_that_needs_the_number_of_samples_warns(loss, layers, named):
    model = keras.Sequential([*layers, keras.layers.Dense(4)])
    model.compile("sgd", loss)
    kc.replicate(model, 3)
    (data,), _ = whole_batches(6)
    with pytest.warns(kc.ConfluxWarning, match=named):
        model.fit(data, verbose=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("data", "size", "expected"),
    [
        # That replicas know their sizes is for steps that need them.
        (whole_batches, 6, None),
        (arrays, 6, None),
        (whole_batches, 8, None),  # does not divide evenly
        (arrays, 9, None),  # is not the size of each batch
    ],
)
def test_what_a_step_is_traced_for(data, size, expected):
    seen = []

    def build():
        model = keras.Sequential(
            [
                keras.layers.Lambda(lambda x: seen.append(x.shape[0]) or x),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
        return model

    given, options = data(size)
    model = kc.replicate(build(), 3)
    model.fit(*given, verbose=0, **options)
    assert seen[-1] == expected


class Counts(keras.layers.Layer):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def build(self, shape):
        self.counted = self.add_weight((), "zeros", trainable=False)

    def call(self, x):
        self.count(self.counted, x)
        return x


COUNTS = {
    "adds samples": lambda v, x: v.assign_add(keras.ops.shape(x)[0]),
    "adds a size": lambda v, x: v.assign_sub(tf.size(x)),
    "adds ones": lambda v, x: v.assign_add(tf.reduce_sum(tf.ones_like(x))),
    "adds steps": lambda v, x: v.assign_add(1),
    "sets steps": lambda v, x: v.assign(v + 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("data", [whole_batches, arrays])
@pytest.mark.parametrize("count", COUNTS)
def test_what_is_counted(count, data):
    def build():
        model = keras.Sequential([Counts(COUNTS[count]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    given, options = data(6)
    assert_same_training(*both(build, given, 3, epochs=2, **options))


def test_a_count_of_the_samples_of_a_shape_is_refused():
    def count(v, x):
        if x.shape[0] is None and not isinstance(x, keras.KerasTensor):
            raise TypeError("needs a number")
        v.assign_add(x.shape[0] or 0)

    model = keras.Sequential([Counts(count), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kc.replicate(model, 3)
    (data,), _ = whole_batches(6)
    with pytest.raises(
        kc.StrategyError, match=r"(?s)'.*/variable.*keras.ops.shape"
    ):
        model.fit(data, verbose=0)


def own_variable(write, **compile_options):
    variable = keras.Variable(0.5, trainable=False, name="kept")

    class Model(keras.Sequential):
        def train_step(self, data):
            write(variable, data[0])
            return super().train_step(data)

    model = Model([keras.layers.Dense(1)])
    model.compile("sgd", "mse", **compile_options)
    model.kept = lambda: variable
    return model


WRITES = {
    "adds a constant": lambda v, x: v.assign_add(1.0),
    "adds a sum": lambda v, x: v.assign_add(keras.ops.sum(x)),
    "averages": lambda v, x: v.assign(0.9 * v + 0.1 * keras.ops.mean(x)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("write", WRITES)
def test_a_variable_that_no_layer_holds(write, size):
    one, many = both(
        lambda: own_variable(WRITES[write]),
        (X, Y),
        3,
        epochs=2,
        batch_size=size,
        shuffle=False,
    )
    assert_same_training(one, many)
    np.testing.assert_allclose(
        many.kept().numpy(), one.kept().numpy(), rtol=1e-5
    )
    kc.assert_in_sync(many.kept())
    for model in (one, kc.unreplicate(many)):
        model.fit(X, Y, batch_size=size, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        many.kept().numpy(), one.kept().numpy(), rtol=1e-5
    )


def _fixed(x):
    return x + tf.random.normal((6, 1))


def _reshaped_in_a_graph(x):
    return tf.reshape(x, [tf.size(x) // 4 * 0 + 6, -1])[: tf.shape(x)[0]] + x


def _numbered(x):
    return x + tf.range(6.0)[:, None]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_constant_of_the_size_of_the_batch_is_that_of_one_device(fixed):
    """What replicas cannot compute of their parts is computed of the batch."""

    def build():
        inputs = keras.Input(batch_shape=(6 if fixed else None, 4))
        outputs = keras.layers.Dense(1)(keras.layers.Lambda(_numbered)(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse", jit_compile=False)
        return model

    data, options = arrays(6)
    assert_same_training(*both(build, data, 3, **options))


@pytest.mark.filterwarnings("ignore:.*depends on other samples")
@pytest.mark.parametrize(
    ("program", "size"),
    [(_fixed, 7), (_reshaped_in_a_graph, 7)],
)
def test_an_error_says_how_many_samples_a_replica_has(program, size):
    model = keras.Sequential([keras.layers.Lambda(program)])
    model.compile("sgd", "mse")
    kc.replicate(model, 3)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as caught:
        model.fit(X, X, batch_size=size, shuffle=False, verbose=0)
    (note,) = caught.value.__notes__
    assert f"3, 2, 2 of {size} samples" in note


@pytest.mark.parametrize("batch", [6, 2], ids=["of all", "of a replica"])
@pytest.mark.parametrize("how", ["fit", "evaluate", "predict"])
def test_a_stateful_layer_is_refused(how, batch):
    inputs = keras.Input(batch_shape=(batch, 4, 2))
    rnn = keras.layers.GRU(3, stateful=True, name="rnn")
    states = keras.layers.Bidirectional(rnn)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(states))
    model.compile("sgd", "mse")
    kc.replicate(model, 3)
    x, y = np.zeros((12, 4, 2), "float32"), np.zeros((12, 1), "float32")
    data = (x,) if how == "predict" else (x, y)
    with pytest.raises(kc.StrategyError, match="_rnn' has `stateful=True`"):
        getattr(model, how)(*data, batch_size=6, verbose=0)


def states_given(count):
    """Trains a layer that is given its states, as a stateful one keeps them."""
    keras.utils.set_random_seed(1)
    inputs, before = keras.Input((4, 2)), keras.Input((3,))
    rnn = keras.layers.GRU(3, return_state=True)
    states, after = rnn(inputs, initial_state=before)
    outputs = keras.layers.Dense(1)(states)
    model = keras.Model([inputs, before], [outputs, after])
    model.compile("adam", [("mse"), None])
    if count:
        kc.replicate(model, count)
    x = np.random.default_rng(0).normal(size=(3, 7, 4, 2)).astype("float32")
    state = np.zeros((7, 3), "float32")
    for batch in x:
        model.train_on_batch([batch, state], batch[:, 0, :1])
        state = model.predict_on_batch([batch, state])[1]
    return [*model.get_weights(), state]


@pytest.mark.long
def test_states_that_are_given_are_those_of_one_device():
    for one, many in zip(states_given(0), states_given(3), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-6)


def test_a_stateful_layer_trains_on_one_device():
    inputs = keras.Input(batch_shape=(6, 4, 2))
    states = keras.layers.GRU(3, stateful=True)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(states))
    model.compile("sgd", "mse")
    kc.replicate(model, 1)
    x, y = np.zeros((12, 4, 2), "float32"), np.zeros((12, 1), "float32")
    model.fit(x, y, batch_size=6, verbose=0)


def test_a_seed_generator_that_no_layer_holds():
    states = []
    for count in (None, 3):
        generator = keras.random.SeedGenerator(7)

        def noisy(x, generator=generator):
            return x + keras.random.normal(keras.ops.shape(x), seed=generator)

        model = keras.Sequential([keras.layers.Lambda(noisy)])
        if count:
            kc.replicate(model, count)
        model.predict(X, batch_size=6, verbose=0)
        states.append(generator.state.numpy())
    np.testing.assert_array_equal(states[1], states[0])


class CountsBatches(keras.layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
        return x


def test_a_batch_of_a_wrong_shape_changes_nothing_for_those_that_follow():
    model = keras.Sequential(
        [keras.Input((4,)), CountsBatches(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, 3)
    data = {"batch_size": 12, "verbose": 0}
    model.fit(X[:12], Y[:12], **data)
    with pytest.raises(ValueError, match="expected axis -1"):
        model.fit(X[:12, :3], Y[:12], **data)
    model.fit(X[:12], Y[:12], **data)
    assert float(model.layers[0].count) == 2
