"""What replaces operations of a step computes the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_conflux as kc
from keras_conflux._extensions.kernels import replacements
from keras_conflux._graphs import rewriting

SAMPLES = LENGTH = 4  # a sum over positions has the shape of one over samples
WIDTH = 6


class Added(layers.Layer):
    """Adds a weight of some shape, repeated as a program may do it."""

    def __init__(self, shape, how, **options):
        super().__init__(**options)
        self.how = how
        self.added = self.add_weight(shape=shape, initializer="ones")

    def call(self, x):
        weight = tf.convert_to_tensor(self.added)
        return x + (weight if self.how is None else self.how(weight, x))


def repeated(weight, x):
    return keras.ops.broadcast_to(weight, keras.ops.shape(x))


def added(shape, how=None):
    def body(x, dtype):
        return Added(shape, how, dtype=dtype)(
            layers.Dense(WIDTH, dtype=dtype)(x)
        )

    return body


def dense(use_bias=True, activation=None):
    def body(x, dtype):
        x = layers.Dense(WIDTH, dtype=dtype)(x)
        inner = layers.Dense(WIDTH, activation, use_bias, dtype=dtype)(x)
        return layers.LayerNormalization(dtype=dtype)(x + inner)

    return body


def attention(x, dtype):
    x = layers.LayerNormalization(dtype=dtype)(layers.Dense(WIDTH)(x))
    attended = layers.MultiHeadAttention(2, 3, dtype=dtype)(x, x)
    return layers.LayerNormalization(dtype=dtype)(x + attended)


def blocks(x, dtype):
    x = layers.Dense(WIDTH, dtype=dtype)(x)
    for _ in range(2):
        h = layers.LayerNormalization(dtype=dtype)(x)
        x = x + layers.MultiHeadAttention(2, 3, dtype=dtype)(h, h)
        h = layers.LayerNormalization(dtype=dtype)(x)
        x = x + layers.Dense(WIDTH, dtype=dtype)(h)
    return x


def convolution(x, dtype):
    x = layers.Dense(WIDTH, dtype=dtype)(x)
    return x + layers.Conv1D(WIDTH, 3, padding="same", dtype=dtype)(x)


def pooled(x, dtype):
    x = layers.MaxPooling1D(3, 2, "same")(layers.Dense(WIDTH, dtype=dtype)(x))
    return layers.UpSampling1D(2)(x)


def turned(x, dtype):
    rows = keras.ops.relu(keras.ops.reshape(x, [-1, WIDTH]))
    x = layers.Dense(WIDTH, "tanh", dtype=dtype)(x)
    return x + keras.ops.cast(
        keras.ops.reshape(rows, [-1, LENGTH, WIDTH]), x.dtype
    )


BODIES = {
    "positions": (added((LENGTH, WIDTH)), ["Sum"]),
    "positions of one sample": (added((1, LENGTH, WIDTH)), ["Sum"]),
    "repeated": (added((LENGTH, WIDTH), repeated), ["AddV2", "Sum"]),
    "one vector": (added((WIDTH,)), []),
    "one number a position": (added((LENGTH, 1)), []),
    "one vector a sample": (added((SAMPLES, 1, WIDTH)), []),
    "one number": (added(()), []),
    "a product": (dense(), ["AddV2"]),
    "a product without bias": (dense(use_bias=False), ["AddV2"]),
    "not a product": (dense(activation="relu"), []),
    "rows that are no product": (turned, []),
    "attention": (attention, ["AddN", "AddV2"]),
    "products one after another": (blocks, ["AddN"] * 2 + ["AddV2"] * 4),
    "a convolution": (convolution, []),
    "the largest of windows": (pooled, ["MaxPoolGrad"]),
}


@pytest.fixture
def replaced(monkeypatch):
    """The types of the operations that others have replaced."""
    found = {}
    original = rewriting.redirect

    def noted(old, new, readers):
        if readers:
            found[old.op.name] = old.op.type
        original(old, new, readers)

    monkeypatch.setattr(rewriting, "redirect", noted)
    return found


def as_traced(monkeypatch, run):
    """Returns what a function returns where nothing is replaced."""
    with monkeypatch.context() as patched:
        patched.setattr(replacements, "_REPLACEMENTS", {})
        return run()


def trained(body, dtype, **options):
    keras.utils.set_random_seed(0)
    given = layers.Input((LENGTH, WIDTH))
    outputs = layers.Dense(1, dtype="float32")(body(given, dtype))
    model = keras.Model(given, outputs)
    kc.replicate(model, devices=1, **options)
    model.compile(keras.optimizers.SGD(0.005), "mse", jit_compile=True)
    x, y = np.random.default_rng(0).normal(size=(2, 3 * SAMPLES, LENGTH, WIDTH))
    y = y[..., :1]
    history = model.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    return model.get_weights(), history.history


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", BODIES)
def test_they_compute_the_same(monkeypatch, replaced, name, dtype):
    body, types = BODIES[name]
    expected, losses = as_traced(monkeypatch, lambda: trained(body, dtype))
    assert not replaced
    found, found_losses = trained(body, dtype)
    if dtype == "float32":
        types = [each for each in types if each != "Sum"]
    assert sorted(replaced.values()) == sorted(types)
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(
        found_losses["loss"], losses["loss"], rtol=tolerance
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("name", ["attention", "positions"])
def test_steps_in_turns_compute_the_same(replaced, name):
    body, types = BODIES[name]
    expected, losses = trained(body, "mixed_bfloat16")
    replaced.clear()
    found, found_losses = trained(body, "mixed_bfloat16", microbatches=2)
    assert sorted(replaced.values()) == sorted(types)
    np.testing.assert_allclose(found_losses["loss"], losses["loss"], rtol=5e-3)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=5e-3)


@pytest.mark.long
def test_loops_of_the_users_compute_the_same(monkeypatch, replaced):
    body, types = BODIES["attention"]

    def trained():
        keras.utils.set_random_seed(0)
        given = layers.Input((LENGTH, WIDTH))
        outputs = layers.Dense(1, dtype="float32")(body(given, "bfloat16"))
        model = kc.replicate(keras.Model(given, outputs), devices=1)
        optimizer = kc.replicate(keras.optimizers.SGD(0.005), devices=1)

        @kc.withdevices(devices=1, jit_compile=True)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        x, y = np.random.default_rng(0).normal(size=(2, SAMPLES, LENGTH, WIDTH))
        batch = x.astype("float32"), y[..., :1].astype("float32")
        return [float(step(*batch)[0]) for _ in range(3)]

    expected = as_traced(monkeypatch, trained)
    assert not replaced
    found = trained()
    assert sorted(replaced.values()) == sorted(types)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


class Asking(keras.Model):
    """Asks for gradients by hidden tensors, in three ways."""

    def __init__(self):
        super().__init__()
        self.inner = [layers.Dense(WIDTH) for _ in range(3)]

    def call(self, x):
        x, first = self.inner[0](x), x[: tf.minimum(1, tf.shape(x)[0])]
        self.hidden = x + self.inner[1](keras.ops.tanh(x))
        return self.hidden + self.inner[2](first)

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
            root = tf.sqrt(tf.reduce_sum(tf.square(self.hidden)))
        weights = self.trainable_variables
        checked = tf.debugging.check_numerics(loss, "not finite")
        with tf.control_dependencies([checked]):
            grads = tape.gradient(loss, weights)
        by_hidden = tape.gradient(root, self.hidden)
        (traced,) = tf.gradients(loss, self.hidden)
        self.optimizer.apply(grads, weights)
        return {
            "loss": loss,
            "hidden": tf.reduce_sum(tf.abs(by_hidden)),
            "traced": tf.reduce_sum(tf.abs(traced)),
        }


@pytest.mark.long
def test_steps_ask_for_gradients_by_what_is_replaced(monkeypatch, replaced):
    def trained():
        keras.utils.set_random_seed(0)
        model = Asking()
        kc.replicate(model, devices=1)
        model.compile(keras.optimizers.SGD(0.1), jit_compile=True)
        x, y = np.random.default_rng(0).normal(size=(2, 8, LENGTH, WIDTH))
        return model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history

    expected = as_traced(monkeypatch, trained)
    found = trained()
    # A sample that is added to all is none of its rows.
    assert list(replaced.values()) == ["AddV2"]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("labels", [[0, 1, 2, 5], [0, 6, 2, 5], [0, -1, 2, 5]])
def test_losses_are_those_of_all_logits(monkeypatch, replaced, labels, dtype):
    def losses():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [layers.Input((3,)), layers.Dense(6, dtype=dtype)]
        )
        kc.replicate(model, devices=1)
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, dtype="float32"
        )
        model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=True)
        x = np.random.default_rng(0).normal(size=(4, 3))
        y = np.array(labels)
        fitted = model.fit(x, y, epochs=3, batch_size=4, verbose=0)
        return [*fitted.history["loss"], model.evaluate(x, y, verbose=0)]

    expected = as_traced(monkeypatch, losses)
    found = losses()
    assert set(replaced.values()) == {"SparseSoftmaxCrossEntropyWithLogits"}
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(found).all() == (not 0 <= labels[1] < 6)


def differentiated(logits, labels, chosen=lambda rows: rows):
    """Returns losses, and their gradients."""
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            chosen(labels), chosen(logits)
        )
    return losses, tape.gradient(losses, logits)


def test_rows_are_chosen_when_the_step_runs(replaced):
    logits = tf.random.stateless_normal((6, 10), (0, 1))
    kept = tf.constant([True, False, True] * 2)
    given = logits, tf.range(6), lambda rows: tf.boolean_mask(rows, kept)
    step = kc.withdevices(differentiated, devices=1, jit_compile=True)
    found, expected = step(*given)[0], differentiated(*given)
    assert "SparseSoftmaxCrossEntropyWithLogits" in replaced.values()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_steps_are_differentiated_once_more(replaced):
    weight = tf.Variable(tf.random.stateless_normal((3, 4), (0, 1)))

    def twice(step):
        with tf.GradientTape() as tape:
            _, gradient = step(weight * 2.0, tf.range(3))
            root = tf.reduce_sum(gradient**2)
        return tape.gradient(root, weight)

    step = kc.withdevices(differentiated, devices=1, jit_compile=True)
    found = twice(lambda *given: step(*given)[0])
    assert "SparseSoftmaxCrossEntropyWithLogits" in replaced.values()
    expected = twice(differentiated)
    # An entry is a difference of numbers as large as the largest one.
    rounding = 2**-23 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=rounding)


def test_functions_for_xla_keep_their_parameters():
    @kc.withdevices(devices=1, jit_compile=True)
    def product(x, args_0=None):
        return x * args_0

    assert product(2.0, args_0=tf.constant(3.0))[0] == 6.0
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="x"):
        product(tf.ones([2, 3]), args_0=tf.ones([3, 2]))
