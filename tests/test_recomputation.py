"""`keras.RematScope` changes memory, and nothing else."""

import contextlib
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
from conftest import several
from keras import layers
from keras import ops
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
@pytest.mark.filterwarnings("ignore:.*no layer has a name")
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


def scoped(layer, mode="full"):
    """Returns a compiled model of which one layer is computed again."""
    with keras.RematScope(mode):
        made = layer()
    model = keras.Sequential(
        [layers.Input((16,)), layers.Dense(16), made, layers.Dense(4)]
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
    """Draws from a state of the whole program, which is not set back."""

    def call(self, x):
        return ops.gelu(x) * tf.random.normal(tf.shape(x))


class PlainVariable(layers.Layer):
    def build(self, shape):
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return ops.gelu(x * self.count)


class InBranch(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        y = tf.cond(
            tf.reduce_sum(x) > 0, lambda: self.counted(x), lambda: ops.gelu(x)
        )
        return tf.cond(tf.reduce_sum(y) > 0, lambda: ops.gelu(y), lambda: y)

    def counted(self, x):
        self.count.assign_add(1.0)
        return ops.gelu(x) * self.count


class OfPython(layers.Layer):
    runs = itertools.count()

    def build(self, shape):
        self.used = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        run = next(self.runs)
        return ops.gelu(x * self.used * run)


class Prints(layers.Layer):
    """An effect that no variable has."""

    def call(self, x):
        tf.print("", end="")
        return ops.gelu(x)


@pytest.mark.parametrize(
    ("layer", "compiled"),
    [
        # XLA prints nothing, and draws other numbers in another program.
        (OfTensorFlow, False),
        (Prints, False),
        (PlainVariable, False),
        (InBranch, True),
        (OfPython, True),
    ],
)
def test_effects_happen_once(layer, compiled):
    found = []
    for mode in (None, "full"):
        keras.utils.set_random_seed(0)
        OfPython.runs = itertools.count()
        model = scoped(layer, mode=mode)
        model.jit_compile = compiled
        model.fit(X, Y, 4, epochs=2, shuffle=False, verbose=0)
        found.append([*model.get_weights(), next(OfPython.runs)])
        if layer is PlainVariable:
            found[-1].append(model.layers[1].count.numpy())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def loop(layer, x):
    return tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, layer(y)), (0, x)
    )[1]


def branch(layer, x):
    return tf.cond(tf.reduce_sum(x) < 1e9, lambda: layer(x), lambda: x)


def function(layer, x):
    return tf.function(layer)(x)


@pytest.mark.parametrize("inside", [loop, branch, function])
def test_a_layer_that_is_differentiated_from_outside_is_warned_of(inside):
    found = []
    for mode in (None, "full"):
        keras.utils.set_random_seed(0)
        with keras.RematScope(mode):
            dense = layers.Dense(16, activation="gelu")
        dense.build((None, 16))

        @tf.function
        def step(x, dense=dense):
            with tf.GradientTape() as tape:
                y = inside(dense, x)
            return tape.gradient(y, dense.kernel.value)

        warned = contextlib.nullcontext()
        if mode:
            warned = pytest.warns(kc.ConfluxWarning, match=f"'{dense.name}'")
        with warned:
            found.append(step(X).numpy())
    np.testing.assert_array_equal(*found)


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
            return ops.tanh(x * held[0])

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
            return ops.mean(self.again(x, scale=2.0), 1)

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


@several
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


def test_python_runs_once_and_layers_twice():
    """Otherwise nothing would be saved, and all of this would be equal."""
    found = {}
    for mode in (None, "full"):
        given = tf.TensorSpec([None, 64])
        step = tf.function(_gradients_of(mode)).get_concrete_function(given)
        types = [each.type for each in step.graph.get_operations()]
        found[mode] = types.count("Erf"), types.count("AssignVariableOp")
    (erf, writes), again = found.values()
    assert again == (2 * erf, writes)


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
