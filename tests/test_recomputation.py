"""`keras.RematScope` changes memory, and nothing else."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import recomputation_cases as cases
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from keras import layers
from recomputation_cases import assert_equal
from recomputation_cases import trained
from xla_memory import bytes_alive

import keras_conflux as kc

IN_CI = (
    (cases.mlp, "larger_than"),
    (cases.attention, "list_of_layers"),
    (cases.add_loss, "activations"),
    (cases.reads_back, "full"),
    (cases.spectral, "full"),
)
X = np.random.default_rng(0).normal(size=(12, 16)).astype("float32")
Y = X[:, :4]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "mode"), IN_CI)
def test_one_device(case, mode):
    wanted = trained(case, None, jit_compile=False)
    assert_equal(trained(case, mode, jit_compile=False), wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [cases.block, cases.counts])
def test_replicas(case):
    """Each normalizes by its own samples, with recomputation and without."""
    wanted = trained(case, None, MANY)
    assert_equal(trained(case, "full", MANY), wanted)


@pytest.mark.long
def test_long_executions_with_accumulation():
    """On one replica XLA compiles them, and their loop."""
    for devices, compiled in ((MANY, ON_GPU), (1, True)):
        options = {
            "steps_per_execution": 3,
            "batch_size": 12,
            "synchronized": True,
            "jit_compile": compiled,
        }
        wanted = trained(
            cases.block, None, optimizer=_accumulating(), **options
        )
        found = trained(
            cases.block, "full", devices, optimizer=_accumulating(), **options
        )
        assert_equal(found, wanted)


def _accumulating():
    return keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::keras_conflux.ConfluxWarning")
@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("devices", [None, MANY])
def test_all(case, mode, jit_compile, devices):
    # One rounding of bfloat16 is 4e-3 of a number.
    tolerance = {"atol": 4e-3} if case is cases.mixed else {}
    for synchronized in (False, True) if devices else (False,):
        options = {
            "devices": devices,
            "synchronized": synchronized,
            "jit_compile": jit_compile,
        }
        wanted = trained(case, None, **options)
        assert_equal(trained(case, mode, **options), wanted, **tolerance)


def scoped(layer, *more):
    """Returns a compiled model of which one layer is computed again."""
    with keras.RematScope("full"):
        made = layer()
    model = keras.Sequential(
        [layers.Input((16,)), layers.Dense(16), made, layers.Dense(4), *more]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


def test_a_scope_around_fit_is_warned_of():
    made = scoped(lambda: layers.Dense(16))
    late = keras.models.clone_model(made)
    late.compile("sgd", "mse", jit_compile=False)
    for model, warned in ((made, 0), (late, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with keras.RematScope("full"):
                model.fit(X, Y, 4, verbose=0)
        found = [w for w in caught if "RematScope" in str(w.message)]
        assert len(found) == warned, caught


class OfTensorFlow(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class PlainVariable(layers.Layer):
    def build(self, shape):
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x * 2


class InBranch(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: self.counted(x), lambda: x)

    def counted(self, x):
        self.count.assign_add(1.0)
        return x


class OfPython(layers.Layer):
    runs = itertools.count()

    def build(self, shape):
        self.used = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        is_first = next(self.runs) % 2 == 0
        return x if is_first else x * self.used


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (OfTensorFlow, "RandomStandardNormal"),
        (PlainVariable, "AssignAddVariableOp"),
        (InBranch, "in a loop, a branch or a function"),
        (OfPython, "only when it is computed again"),
    ],
)
def test_what_cannot_be_repeated_is_refused(layer, says):
    OfPython.runs = itertools.count(1)  # the first call asks for shapes
    model = scoped(layer)
    with pytest.raises(NotImplementedError, match=says) as error:
        model.fit(X, Y, 4, verbose=0)
    assert model.layers[1].name in str(error.value)
    assert "RematScope" in str(error.value)


def test_a_loop_around_a_layer_is_refused():
    with keras.RematScope("full"):
        dense = layers.Dense(16)
    dense.build((None, 16))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            _, y = tf.while_loop(
                lambda i, y: i < 3, lambda i, y: (i + 1, dense(y)), (0, x)
            )
        return tape.gradient(y, dense.kernel.value)

    with pytest.raises(NotImplementedError, match="in a loop of TensorFlow"):
        step(X)


def test_tensors_and_derivatives_outside_of_a_layer_keep_their_gradients():
    """A tensor that another layer has kept, and derivatives of derivatives."""
    held = []

    class Holds(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(16,))

        def call(self, x):
            held[:] = [x * self.kernel]
            return held[0]

    class Takes(layers.Layer):
        def call(self, x):
            return keras.ops.tanh(x * held[0])

    found = []
    for mode in (None, "full"):
        keras.utils.set_random_seed(0)
        with keras.RematScope(mode):
            first, second = Holds(), Takes()
        first.build((4, 16))

        @tf.function
        def step(x, first=first, second=second):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(second(tf.square(first(x))))
                slope = tf.reduce_sum(tf.square(inner.gradient(y, x)))
            return tape.gradient(slope, first.kernel.value)

        found.append(step(tf.constant(X)).numpy())
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_functions_and_sparse_gradients_on_replicas():
    """`keras.remat` of a function of the user's, and rows of an embedding."""

    class Own(layers.Layer):
        def __init__(self, remat, **kwargs):
            super().__init__(**kwargs)
            self.embed = layers.Embedding(16, 8)
            self.drop = layers.Dropout(0.3, seed=3)
            self.again = keras.remat(self.part) if remat else self.part

        def part(self, x, scale=1.0):
            return self.drop(self.embed(x)) * scale

        def call(self, x):
            return keras.ops.mean(self.again(x, scale=2.0), 1)

    ids = np.random.default_rng(0).integers(0, 16, (22, 5))
    found = []
    for remat in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [layers.Input((5,), dtype="int32"), Own(remat), layers.Dense(1)]
        )
        # By Adam, rows that repeat count otherwise on GPUs (guarantees.md).
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if remat:
            kc.replicate(model, DEVICES)
        model.fit(ids, ids[:, :1] / 16.0, 8, epochs=2, verbose=0)
        found.append(model.get_weights())
    for one, many in zip(*found, strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-6)


class InFunction(keras.Model):
    """Takes gradients in a function, which captures weights in parts."""

    def train_step(self, data):
        weights = self.trainable_variables

        @tf.function
        def gradients(x, y):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            return tape.gradient(loss, weights)

        self.optimizer.apply(gradients(*data), weights)
        return {"loss": 0.0}


@pytest.mark.skipif(MANY < 2, reason="takes several devices")
def test_weights_in_parts_that_a_function_captures():
    x = np.random.default_rng(0).normal(size=(12, 65)).astype("float32")
    found = []
    for mode, shard in ((None, None), ("full", "weights")):
        keras.utils.set_random_seed(0)
        given = layers.Input((65,))
        with keras.RematScope(mode):
            hidden = layers.Dense(67, activation="tanh")
        model = InFunction(given, layers.Dense(3)(hidden(given)))
        if shard:
            kc.replicate(model, MANY, shard=shard)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(x, x[:, :3], 12, verbose=0)
        found.append(model.get_weights())
    for one, many in zip(*found, strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-6)


def test_a_layer_is_run_twice():
    """Otherwise nothing would be saved, and all of this would be equal."""
    runs = []

    class Counted(layers.Layer):
        def call(self, x):
            runs.append(tf.executing_eagerly())
            return keras.ops.tanh(x)

    model = scoped(Counted)
    runs.clear()
    model.fit(X, Y, 12, verbose=0)
    in_training = len(runs)
    runs.clear()
    model.evaluate(X, Y, 12, verbose=0)
    assert in_training > len(runs) >= 1


class Wide(layers.Layer):
    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.up = layers.Dense(4 * width, activation="gelu")
        self.drop = layers.Dropout(0.1, seed=1)
        self.down = layers.Dense(width)
        self.batch = layers.BatchNormalization()

    def call(self, x):
        inner = self.down(self.drop(self.up(self.norm(x))))
        return x + self.batch(inner)


def _gradients_of(mode):
    """Returns a function of a batch, made in a scope of this mode."""
    with keras.RematScope(mode):
        model = keras.Sequential(
            [layers.Input((64,)), *(Wide(64) for _ in range(6))]
        )

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        weights = [each.value for each in model.trainable_weights]
        return tape.gradient(loss, weights)

    return step


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="reads the schedule of XLA on CPUs")
def test_memory():
    x = np.random.default_rng(0).normal(size=(512, 64)).astype("float32")
    found = {}
    for mode in (None, "full"):
        step = tf.function(_gradients_of(mode), jit_compile=True)
        hlo = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
        found[mode] = bytes_alive(hlo)
    assert found["full"] < 0.5 * found[None], found
