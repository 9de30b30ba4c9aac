"""A mistake of a user's is refused with what to write."""

import functools
import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from models import dense

import keras_conflux as kc

X = np.random.default_rng(0).normal(size=(12, 8)).astype("float32")
Y = X[:, :1]
NAMES = [f"{each.kind.lower()}:{each.ordinal}" for each in DEVICES]


def test_fit_in_a_step():
    model = kc.replicate(dense(), MANY)
    step = kc.withdevices(lambda x, y: model.fit(x, y, verbose=0))
    with pytest.raises(kc.StrategyError, match=r"outside of a `withdevices`"):
        step(*kc.split((X, Y), MANY))


def test_the_value_of_a_tensor_in_a_step():
    step = kc.withdevices(lambda x: tf.reduce_mean(x).numpy())
    with pytest.raises(AttributeError) as raised:
        step(kc.split(X, MANY))
    assert any("`tf.print`" in note for note in raised.value.__notes__)


def test_the_length_of_a_tensor_where_autograph_converts_nothing():
    typed = {"tf": tf}
    exec("def step(x): return tf.reduce_sum(x) / len(x)", typed)
    with pytest.raises(TypeError) as in_a_loop:
        kc.withdevices(typed["step"])(kc.split(X, MANY))
    model = kc.replicate(dense(), MANY)
    model.train_step = lambda data: {"loss": tf.reduce_sum(len(data[0]))}
    with pytest.raises(TypeError) as in_fit:
        model.fit(X, Y, verbose=0)
    for raised in (in_a_loop, in_fit):
        notes = [x for x in raised.value.__notes__ if "`len` of" in x]
        assert len(notes) == 1
        assert "typed at a prompt" in notes[0]


def test_weights_that_came_after_the_optimizer():
    model = kc.replicate(dense(), MANY)
    optimizer = kc.replicate(keras.optimizers.SGD(), MANY)
    model.layers[0].enable_lora(1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = kc.allreduce("sum", gradients)
        optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(kc.StrategyError, match="again after `enable_lora`"):
        kc.withdevices(step)(kc.split(X, MANY))
    kc.replicate(model, MANY)
    kc.withdevices(step)(kc.split(X, MANY))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kc.split(3.0), r"Received: the value is 3\.0\. "),
        (lambda: kc.split({"a": 3.0}), r"Received: \['a'\] is 3\.0\. "),
        (
            lambda: kc.replicate(keras.losses.MeanSquaredError()),
            "no use for the value, a MeanSquaredError: ",
        ),
    ],
)
def test_a_value_that_is_alone_is_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@several
def test_a_mean_of_gradients_of_an_average():
    """The loss of TensorFlow's tutorial, which its strategies add up."""
    layer = keras.layers.Dense(1, use_bias=False)
    model = kc.replicate(keras.Sequential([keras.Input((8,)), layer]), MANY)

    def step(x, op, **options):
        with tf.GradientTape() as tape:
            losses = tf.squeeze(model(x), 1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=len(X))
        return kc.allreduce(op, tape.gradient(loss, layer.kernel), **options)

    added_up = kc.withdevices(lambda x: step(x, "sum"))(kc.split(X, MANY))
    np.testing.assert_allclose(added_up[0][:, 0], X.mean(0), rtol=1e-5)
    average = kc.withdevices(lambda x: step(x, "mean", weight=len(x)))
    with pytest.warns(kc.ConfluxWarning, match=r'Write `allreduce\("sum", '):
        average(kc.split(X, MANY))


def names_there(**of_scope):
    """Trains a model of a layer `first`, and returns what it warns of."""
    with keras.RematScope(**of_scope):
        first = keras.layers.Dense(4, name="first")
        last = keras.layers.Dense(1, name="last")
        model = keras.Sequential([keras.Input((8,)), first, last])
    model = kc.replicate(model)
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)
    return [str(x.message) for x in caught if x.category is kc.ConfluxWarning]


def test_names_that_no_layer_has():
    listed = functools.partial(names_there, mode="list_of_layers")
    assert not listed(layer_names=["first"])
    assert not names_there()
    said = listed(layer_names=["first", "lst"])[0]
    assert "lists: ['lst']" in said
    assert "'first', 'last']" in said


@several
def test_keys_that_match_no_weight():
    mesh = keras.distribution.DeviceMesh((1, MANY), ["batch", "model"], NAMES)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*first/kernel"] = (None, "model")
    layouts[".*last/output"] = ("batch", None)
    layouts["lst/kernel"] = ("model", None)
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        said = names_there()[0]
        assert "match no weight: ['lst/kernel']" in said
        assert "first/bias', " in said
        del layouts["lst/kernel"]
        assert not names_there()


def test_an_optimizer_of_another_model():
    other = dense()
    other.compile("adam", "mse")
    other.fit(X, Y, verbose=0)
    model = kc.replicate(dense(), MANY)
    model.compile(other.optimizer, "mse")
    with pytest.raises(ValueError, match="Unknown variable") as raised:
        model.fit(X, Y, verbose=0)
    assert "samples" not in "".join(getattr(raised.value, "__notes__", []))


def test_fit_of_batches_for_a_loop():
    model = kc.replicate(dense(), MANY)
    batches = kc.distribute([(X, Y)], MANY)
    with pytest.raises(ValueError, match=r"give `fit`, .* the data set itself"):
        model.fit(batches, verbose=0)


def test_samples_in_place_of_batches():
    model = kc.replicate(dense(), MANY)
    samples = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=r"input shape") as raised:
        model.fit(samples, verbose=0)
    assert any("`dataset.batch(" in note for note in raised.value.__notes__)


@pytest.mark.skipif(MANY < 2 or ON_GPU, reason="takes several CPU devices")
def test_the_compiler_is_asked_for_on_several_cpu_devices(capsys):
    model = kc.replicate(dense(), MANY)
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(X, Y, verbose=0)
    assert "which is for one CPU device or GPUs" in capsys.readouterr().err


@several
def test_a_plain_loop_says_once_that_one_device_computes(capsys):
    model = kc.replicate(dense(), MANY)
    optimizer = kc.replicate(keras.optimizers.SGD(), MANY)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    said = capsys.readouterr().err
    assert said.count("one device computes") == 1
    assert "`keras_conflux.withdevices`" in said


def test_another_backend_that_is_not_there():
    environ = os.environ | {"KERAS_BACKEND": "nonsense"}
    command = [sys.executable, "-c", "import keras_conflux"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert "KERAS_BACKEND=tensorflow" in ended.stderr


def hinge(y, p, alpha):
    return alpha * tf.reduce_mean(tf.nn.relu(0.5 - y * p))


def hinge_and_distance(y, p, alpha):
    above = tf.cast(y > 0, p.dtype)
    distance = tf.reduce_sum(p * above) / tf.reduce_sum(above)
    return hinge(y, p, alpha) - distance


LOSSES = {
    "a mean of a variable that is given": (hinge, "variable"),
    "a ratio of a value that is given": (hinge_and_distance, "value"),
    "a ratio of a variable that is read": (hinge_and_distance, "read"),
}


@several
@pytest.mark.parametrize("case", LOSSES)
def test_losses_in_a_function_that_reads_a_variable(case):
    """As those of deel-lip."""
    of, how = LOSSES[case]

    def trained(devices):
        keras.utils.set_random_seed(1)
        alpha = tf.Variable(2.0)
        inside = tf.function(of)
        if how == "read":
            inside = tf.function(lambda y, p, _: of(y, p, alpha))
        model = kc.replicate(dense(), devices)
        model.compile(
            keras.optimizers.SGD(0.1),
            lambda y, p: inside(
                y, p, alpha if how == "variable" else 1 * alpha
            ),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", kc.ConfluxWarning)
            model.fit(X, Y, batch_size=len(X), epochs=2, verbose=0)
        return model, [str(warning.message) for warning in caught]

    found, said = trained(MANY)
    compiler = [text for text in said if "XLA cannot compile" in text]
    said = [text for text in said if text not in compiler]
    assert len(compiler) == ON_GPU
    assert bool(said) == (how == "read")
    expected, _ = trained(1)
    pairs = [*zip(found.get_weights(), expected.get_weights(), strict=True)]
    for text in said:
        assert "nor in a `tf.function` that reads a variable" in text
    for a, b in pairs if not said else []:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
