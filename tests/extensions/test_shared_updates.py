"""Optimizers update variables of one shape by one trace, in programs of XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ON_GPU
from keras import optimizers

import keras_conflux as kc
from keras_conflux._compat import keras_optimizers
from keras_conflux._fit.numerics import given_tensors

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = RNG.integers(0, 3, 24)

OPTIMIZERS = {
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(
        optimizers.schedules.CosineDecay(0.01, 20), global_clipnorm=0.5
    ),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Lion": lambda: optimizers.Lion(0.01),
    "Muon": lambda: optimizers.Muon(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "SGD": lambda: optimizers.SGD(0.1),
    "accumulating": lambda: optimizers.AdamW(
        0.01, gradient_accumulation_steps=2
    ),
    "a rate of one's own": lambda: optimizers.AdamW(lambda: 0.01),
    "averaging": lambda: optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, use_ema=True
    ),
    "scaling": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=2
    ),
}


def trained(optimizer):
    """Trains four layers of one shape, of which one is frozen, and others."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, "tanh", name=f"d{n}") for n in range(4)]
    layers[1].trainable = False
    model = keras.Sequential(
        [keras.Input((6,)), *layers, keras.layers.Dense(3, name="last")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=True)
    kc.replicate(model, kc.devices(1))
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    state = [keras.ops.convert_to_numpy(x) for x in model.optimizer.variables]
    return history.history["loss"], model.get_weights(), state


def assert_same(found, expected):
    """Bit for bit, or, on a GPU, up to the order of sums over samples.

    There XLA times kernels, and may choose different ones for the same sum.
    """
    largest = 1e-6 * np.max(np.abs(expected)) if ON_GPU else 0.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=largest)


@pytest.fixture
def traced(monkeypatch):
    """The shapes whose updates were traced."""
    shapes = []
    original = given_tensors.SharedUpdate._updated

    def updated(self, gradient, *arguments):
        shapes.append(tuple(gradient.shape))
        return original(self, gradient, *arguments)

    monkeypatch.setattr(given_tensors.SharedUpdate, "_updated", updated)
    return shapes


@pytest.mark.long
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_shared_update_does_what_those_of_each_variable_do(
    monkeypatch, traced, name
):
    found = trained(OPTIMIZERS[name]())
    shapes = list(traced)
    assert sorted(shapes) == [(3,), (6,), (6, 3), (6, 6)]
    monkeypatch.setattr(
        keras_optimizers, "updates_with_tensors", lambda *_: False
    )
    expected = trained(OPTIMIZERS[name]())
    assert traced == shapes
    keras.tree.map_structure(assert_same, found, expected)


def test_optimizers_that_keep_values_are_traced_for_each_variable(traced):
    trained(optimizers.ScheduleFreeAdamW(0.01))
    assert not traced


class Counting(optimizers.SGD):
    """Counts its updates, of all variables."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.count = self.add_variable((), name="count")

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.count, 1.0)
        super().update_step(gradient, variable, learning_rate)


def test_an_optimizer_of_ones_own_is_traced_for_each_variable(traced):
    assert trained(Counting(0.1))[2][2] == 6 * 8
    assert not traced


def test_an_update_of_ones_own_is_traced_for_each_variable(traced):
    optimizer = optimizers.SGD(0.1)
    updates = optimizer.update_step
    optimizer.update_step = lambda *arguments: updates(*arguments)
    trained(optimizer)
    assert not traced


def test_variables_of_tensorflow_are_traced_one_by_one(traced):
    layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")
    layer.build((None, 2))
    plain = tf.Variable(tf.ones([2, 2]))
    optimizer = optimizers.Adam(0.1)
    optimizer.build([layer.kernel, plain])
    kc.replicate([layer, optimizer], kc.devices(1))

    @kc.withdevices(devices=1, jit_compile=True)
    def step():
        gradients = kc.allreduce("mean", [tf.ones([2, 2])] * 2)
        optimizer.apply(gradients, [layer.kernel, plain])

    step()
    np.testing.assert_array_equal(layer.kernel, plain)
    assert traced == [(2, 2)]


def test_an_update_that_writes_more_is_traced_for_each_variable(
    monkeypatch, traced
):
    monkeypatch.setattr(
        keras_optimizers, "updates_with_tensors", lambda *_: True
    )
    assert trained(Counting(0.1))[2][2] == 6 * 8
    assert len(traced) == 8  # each is tried


def weights_after(model, on_replica):
    if on_replica:
        kc.replicate(model, kc.devices(1))
    model.fit(X, X, batch_size=8, verbose=0, shuffle=False)
    return [np.asarray(x, "float64") for x in model.get_weights()]


class Shift(keras.layers.Layer):
    def build(self, _):
        self.shift = self.add_weight(initializer="ones")
        self.other = self.add_weight(initializer="ones")

    def call(self, x):
        return x * self.other + self.shift


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", ["learning_rate", "epsilon"])
def test_settings_may_be_variables_that_are_trained(setting):
    def train(on_replica):
        keras.utils.set_random_seed(0)
        shift = Shift()
        model = keras.Sequential(
            [keras.Input((6,)), shift, keras.layers.Dense(6)]
        )
        optimizer = optimizers.RMSprop(lambda: 0.01)
        if setting == "learning_rate":
            optimizer = optimizers.SGD(lambda: shift.shift)
        else:
            optimizer.epsilon = shift.other
        model.compile(optimizer, "mse", jit_compile=True)
        return weights_after(model, on_replica)

    for one, other in zip(train(False), train(True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(optimizers.Muon, "bfloat16"), (optimizers.Adam, "float64")],
)
def test_variables_of_other_dtypes(kind, dtype):
    def train(on_replica):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(6, "tanh", dtype=dtype) for _ in range(2)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(kind(0.01), "mse", jit_compile=True)
        return weights_after(model, on_replica)

    for one, other in zip(train(False), train(True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_optimizers_in_a_scope_of_ones_own_are_kerass():
    layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")
    layer.build((None, 2))
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(layer.trainable_variables)
    with keras.StatelessScope():
        optimizer.apply([tf.ones((2, 2))], layer.trainable_variables)
    np.testing.assert_allclose(layer.kernel, 0.9 * np.ones((2, 2)))
    np.testing.assert_allclose(optimizer.momentums[0], -0.1 * np.ones((2, 2)))


class InLoop(keras.Sequential):
    """Takes three steps for each batch."""

    def train_step(self, data):
        def step(count, _):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return count + 1, loss

        loss = tf.while_loop(lambda count, _: count < 3, step, (0, 0.0))[1]
        return {"loss": loss}


class UnderTape(keras.Sequential):
    """Applies gradients of what it has after a step."""

    def train_step(self, data):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            after = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        gradients = outer.gradient(after, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": after}


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [InLoop, UnderTape])
def test_updates_in_steps_of_ones_own(traced, kind):
    def train(on_replica):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(6, "tanh") for _ in range(3)]
        model = kind([keras.Input((6,)), *layers])
        model.compile(optimizers.AdamW(0.01), jit_compile=True)
        return weights_after(model, on_replica)

    expected = train(on_replica=False)
    assert not traced
    for one, other in zip(expected, train(on_replica=True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert set(traced) == {(6,), (6, 6)}


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="gradients are made dense on GPUs")
def test_sparse_gradients_are_not_shared(traced):
    rows = RNG.integers(0, 9, (8, 3))

    def train(on_replica):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(9, 4), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        optimizer = optimizers.Adam(0.01, weight_decay=0.1)
        model.compile(optimizer, "mse", jit_compile=True)
        if on_replica:
            kc.replicate(model, kc.devices(1))
        model.fit(rows, np.zeros((8, 3, 4)), batch_size=4, verbose=0)
        return model.get_weights()

    expected = train(on_replica=False)
    assert not traced
    for one, other in zip(expected, train(on_replica=True), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)
    assert sorted(traced) == [(4,), (4, 4)]


def test_updates_of_a_loop_of_ones_own_are_shared(traced):
    layer = keras.Sequential([keras.layers.Dense(6) for _ in range(3)])
    layer.build((None, 6))
    optimizer = optimizers.Adam(0.01)
    optimizer.build(layer.trainable_variables)
    kc.replicate([layer, optimizer], kc.devices(1))

    @kc.withdevices(devices=1, jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        gradients = kc.allreduce("mean", gradients)
        optimizer.apply(gradients, layer.trainable_variables)
        return loss

    losses = [float(step(tf.ones([4, 6]))[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert sorted(traced) == [(6,), (6, 6)]
