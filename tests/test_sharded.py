"""State and weights that lie in parts train what one device trains."""

import functools
import gc
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import warnings
import zipfile

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import COUNTS
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import RUN_LONG_TESTS
from conftest import several
from keras import layers
from keras import optimizers
from sharded_cases import OPTIMIZERS
from sharded_cases import RNG
from sharded_cases import TOLERANCE
from sharded_cases import WIDTH
from sharded_cases import X
from sharded_cases import Y
from sharded_cases import assert_equal
from sharded_cases import bytes_on_devices
from sharded_cases import close
from sharded_cases import model
from sharded_cases import that_update
from sharded_cases import trained

import keras_conflux as kc

SHARDS = ("weights", "optimizer")
SEVERAL = [count for count in COUNTS if count > 1]
pytestmark = several


@functools.cache
def on_one_device(name):
    return trained(OPTIMIZERS[name]())


def runs():
    """Yields each optimizer with both words, and one number of devices each."""
    for index, name in enumerate(OPTIMIZERS):
        for shard in SHARDS:
            for count in SEVERAL:
                is_sample = count == SEVERAL[index // 6 % len(SEVERAL)]
                if RUN_LONG_TESTS or (is_sample and index % 6 == 0):
                    yield name, shard, count


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "shard", "count"), [*runs()])
def test_training_equals_one_device(name, shard, count):
    found = trained(OPTIMIZERS[name](), count, shard)
    assert_equal(found, on_one_device(name), TOLERANCE)


class OfTwo(keras.Model):
    """A step of the user's own, which looks at whole gradients."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.metrics.Mean("norm")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        grads = tape.gradient(loss, weights)
        for g, weight in zip(grads, weights, strict=True):
            assert g.shape == weight.shape
        self.norm.update_state(tf.linalg.global_norm(grads))
        grads = [g * 0.5 for g in grads]
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss, "norm": self.norm.result()}


class After(keras.Model):
    """A step that reads the weights again, after they have been updated."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": self.compute_loss(x, y, self(x, training=True))}


class Adversaries(After):
    """Two tapes in a step, over the same weights and others."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        first = tape.gradient(loss, self.trainable_variables)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                total = keras.ops.sum(self(x))
            slope = inner.gradient(total, x)
            penalty = keras.ops.mean(keras.ops.square(slope))
        second = outer.gradient(penalty, self.trainable_variables)
        grads = [
            a if b is None else a + b
            for a, b in zip(first, second, strict=True)
        ]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


class PenalizedSlopes(keras.Model):
    """Adds the slopes by its weights to the loss."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = self.compute_loss(x, y, self(x, training=True))
            slopes = inner.gradient(loss, weights)
            penalized = loss + sum(map(tf.nn.l2_loss, slopes))
        self.optimizer.apply(outer.gradient(penalized, weights), weights)
        return {"loss": penalized}


class Groups(OfTwo):
    """Two optimizers in a step, for two groups of weights."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.second = optimizers.Adam(0.01)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        groups = self.trainable_variables[:2], self.trainable_variables[2:]
        first, second = tape.gradient(loss, groups)
        self.optimizer.apply(first, groups[0])
        self.second.apply(second, groups[1])
        return {"loss": loss}


def two_optimizers():
    keras.utils.set_random_seed(1)
    given = layers.Input((WIDTH,))
    hidden = layers.Dense(67, activation="tanh")(given)
    hidden = layers.Dense(67, activation="tanh")(hidden)
    return Groups(inputs=given, outputs=layers.Dense(3)(hidden))


def two_tapes():
    one = own_step()
    return Adversaries(one.inputs, one.outputs)


def slopes_of_slopes():
    one = own_step()
    return PenalizedSlopes(one.inputs, one.outputs)


def two_updates():
    one = own_step()
    return After(one.inputs, one.outputs)


def own_step():
    keras.utils.set_random_seed(1)
    given = layers.Input((WIDTH,))
    hidden = layers.Dense(67, activation="tanh")(given)
    return OfTwo(inputs=given, outputs=layers.Dense(3)(hidden))


def tied_and_frozen():
    """A kernel that two layers read, one that is frozen, and a penalty."""
    keras.utils.set_random_seed(1)
    given = layers.Input((WIDTH,))
    tied = layers.Dense(WIDTH, activation="tanh", kernel_regularizer="l2")
    frozen = layers.Dense(70, trainable=False)
    return keras.Sequential(
        [
            given,
            tied,
            layers.BatchNormalization(synchronized=True),
            tied,
            frozen,
            layers.Dense(71, kernel_constraint="max_norm"),
            layers.Dense(3),
        ]
    )


def nested():
    keras.utils.set_random_seed(1)
    inner = keras.Sequential(
        [
            layers.Input((5, 13)),
            layers.LSTM(33, return_sequences=True),
            layers.LSTM(33),
        ]
    )
    given = layers.Input((WIDTH,))
    outputs = layers.Dense(3)(inner(layers.Reshape((5, 13))(given)))
    return keras.Model(given, outputs)


class Branching(layers.Layer):
    """Reads a weight in a branch, and in a function."""

    def build(self, shape):
        shape = (shape[-1], shape[-1])
        self.one = self.add_weight(shape=shape, name="one")
        self.two = self.add_weight(shape=shape, name="two")
        self.three = self.add_weight(shape=shape, name="three")

    @tf.function
    def in_function(self, x):
        return keras.ops.matmul(x, self.three)

    def call(self, x):
        x = keras.ops.cond(
            keras.ops.sum(self.one) > -1e9,
            lambda: keras.ops.matmul(x, self.one),
            lambda: keras.ops.matmul(x, self.two),
        )
        return self.in_function(keras.ops.tanh(x))


def spectral():
    """A layer that writes its kernel when it is called."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.SpectralNormalization(layers.Dense(70), power_iterations=2),
            layers.Dense(3),
        ]
    )


def branching():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [layers.Input((WIDTH,)), Branching(), layers.Dense(3)]
    )


def mixed():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return model()
    finally:
        keras.config.set_dtype_policy(before)


MODELS = {
    "own step": (own_step, 5e-5),
    "two tapes in a step": (two_tapes, 5e-5),
    "two updates in a step": (two_updates, 5e-5),
    "two optimizers in a step": (two_optimizers, 5e-5),
    "tied and frozen": (tied_and_frozen, 5e-5),
    "nested, recurrent": (nested, 5e-5),
    "branching": (branching, 5e-5),
    "spectral normalization": (spectral, 5e-5),
    "mixed precision": (mixed, 3e-2),
}


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_device(name, shard):
    made, tolerance = MODELS[name]

    def optimizer():
        return optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)

    expected = trained(optimizer(), made=made)
    found = trained(optimizer(), MANY, shard, made=made)
    assert_equal(found, expected, tolerance)


TOKENS = RNG.integers(0, 150, (160, 6)) * RNG.integers(0, 2, (160, 6))


class Rows(layers.Layer):
    """Looks up rows of a weight that is cast, which an embedding's is not."""

    def build(self, _):
        self.table = self.add_weight(shape=(150, 32), name="table")

    def call(self, x):
        return keras.ops.take(self.table, x, axis=0)


def language_model():
    """In bfloat16; half of the tokens are the same one."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        keras.utils.set_random_seed(1)
        given = layers.Input((6,), dtype="int32")
        x = layers.Embedding(150, 32)(given) + Rows()(given)
        hidden = layers.Dense(130)(layers.LayerNormalization()(x))
        x += layers.Dense(32, activation="gelu")(hidden)
        return keras.Model(given, layers.Dense(150, dtype="float32")(x))
    finally:
        keras.config.set_dtype_policy(before)


@functools.cache
def trained_in_bfloat16(steps, count=None, shard=None):
    """Returns the losses of an execution of some steps, and the weights."""
    one = language_model()
    if count:
        kc.replicate(one, devices=count, shard=shard)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    one.compile(optimizers.SGD(0.5), loss, steps_per_execution=steps)
    data = TOKENS[: 8 * steps]
    losses = one.fit(data, data, batch_size=8, shuffle=False, verbose=0)
    return losses.history["loss"], one.get_weights()


@pytest.mark.long
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("steps", [1, 20])
def test_an_execution_in_bfloat16_is_as_with_copies(shard, steps):
    """What is reduced and gathered has the dtypes that copies have."""
    losses, weights = trained_in_bfloat16(steps, 2)
    found_losses, found = trained_in_bfloat16(steps, 2, shard)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    for a, b in zip(found, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def with_lora(given=None):
    one = given or model()
    for layer in one.layers:
        if isinstance(layer, layers.Dense):
            layer.enable_lora(3)
        else:
            layer.trainable = False
    return one


@pytest.mark.long
def test_lora_trains_beside_weights_in_parts():
    expected = trained(optimizers.Adam(0.01), made=with_lora)
    before = trained(optimizers.Adam(0.01), MANY, "weights", made=with_lora)
    assert_equal(before, expected, TOLERANCE)

    def with_lora_since():
        one = kc.replicate(model(), devices=MANY, shard="weights")
        return with_lora(one)

    found = trained(optimizers.Adam(0.01), made=with_lora_since)
    assert_equal(found, expected, TOLERANCE)
    one, _ = found
    frozen = [v for v in one.non_trainable_weights if not is_whole(v)]
    assert len(frozen) == 3
    size = 4 * sum(v.shape.num_elements() for v in frozen)
    assert max(bytes_on_devices(frozen)) < size / MANY + 4 * len(frozen)
    trained_ones = one.trainable_weights
    assert len(trained_ones) == 2 * 4 + 4  # and biases
    assert len(one.optimizer.variables) == 2 + 2 * len(trained_ones)


def embeddings():
    """A table of 4,345 entries, which are no multiple, and lookups of it."""
    keras.utils.set_random_seed(1)
    given = layers.Input((6,), dtype="int32")
    table = layers.Embedding(79, 55)
    x = table(given) + table(given[:, ::-1])
    x = layers.Flatten()(x)
    return keras.Model(given, layers.Dense(3)(x))


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("count", SEVERAL)
def test_an_embedding_of_an_odd_size(shard, count):
    x = TOKENS[:22] % 79
    expected = trained(optimizers.SGD(0.05), made=embeddings, x=x)
    found = trained(optimizers.SGD(0.05), count, shard, made=embeddings, x=x)
    assert_equal(found, expected, TOLERANCE)
    table = found[0].layers[1].embeddings
    (*_, held) = bytes_on_devices([table])
    cut = -(-4345 // count) if shard == "weights" else 4345
    assert held == 4 * cut


@pytest.mark.skipif(ON_GPU, reason="has sparse gradients of embeddings")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_rows_that_repeat_are_clipped_as_on_one_device(clip, rows, shard):
    """Or, of a table in parts, a warning says that they are not."""

    def made():
        keras.utils.set_random_seed(1)
        table = layers.Embedding(rows, 64)
        return keras.Sequential(
            [layers.Input((6,)), table, layers.Flatten(), layers.Dense(3)]
        )

    x = TOKENS[:22, :6] % 5
    options = {clip: 1e-3}
    expected = trained(optimizers.SGD(0.5, **options), made=made, x=x)
    is_cut = rows * 64 >= 4096
    with pytest.warns(match="repeat") if is_cut else warnings.catch_warnings():
        warnings.simplefilter("always" if is_cut else "error")
        optimizer = optimizers.SGD(0.5, **options)
        found = trained(optimizer, MANY, shard, made=made, x=x)
    if not is_cut:
        assert_equal(found, expected)


def is_whole(variable):
    return variable.shape.num_elements() < 4096


def test_a_batch_of_fewer_samples_than_devices_says_so(capsys):
    one = keras.Sequential([layers.Input((WIDTH,)), layers.Dense(65)])
    kc.replicate(one, devices=MANY, shard="weights")
    one.compile("sgd", "mse")
    one.fit(X[:1], X[:1], verbose=0)
    sizes = f"batches of 1 = 1 x 1 + {MANY - 1} x 0\n"
    assert capsys.readouterr().err.endswith(sizes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
def test_devices_hold_parts(shard):
    one, _ = trained(optimizers.Adam(0.01), MANY, shard)
    for variables, is_cut in (
        (one.weights, shard == "weights"),
        (one.optimizer.variables, True),
    ):
        large = [v for v in variables if not is_whole(v)]
        small = [v for v in variables if is_whole(v)]
        size = sum(v.shape.num_elements() for v in large) * 4
        expected = size / MANY if is_cut else size
        for held in bytes_on_devices(large):
            assert expected <= held < expected + 4 * len(large)
        one_copy = sum(
            v.shape.num_elements() * tf.as_dtype(v.dtype).size for v in small
        )
        assert set(bytes_on_devices(small)) == {one_copy}


class Memory:
    """A tensor on a CPU device, as NumPy knows those of others."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **_):
        return tf.experimental.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self):
        return 1, 0


def addresses(tensor):
    """Returns where in memory a tensor begins and ends."""
    found = np.from_dlpack(Memory(tensor))
    begin = found.__array_interface__["data"][0]
    return range(begin, begin + found.nbytes)


@pytest.mark.skipif(ON_GPU, reason="reads addresses of the CPU")
def test_parts_do_not_keep_the_whole():
    """TensorFlow's cuts are views, which keep all that they are cut from."""
    one = keras.Sequential([layers.Input((64,)), layers.Dense(96)])
    kernel = one.variables[0]
    before = kernel.value.read_value()  # so that its memory is not used again
    kc.replicate(one, devices=2, shard="weights")
    given = tf.random.normal([64, 96])
    for whole in (before, given):
        if whole is given:
            kernel.assign(given)
        np.testing.assert_array_equal(kernel.numpy(), whole.numpy())
        for part in kernel.value.values:
            assert addresses(part.read_value()).start not in addresses(whole)


@pytest.mark.skipif(not ON_GPU, reason="CPU devices do not count memory")
@pytest.mark.parametrize("shard", SHARDS)
def test_gpus_hold_what_was_told(shard):
    """TensorFlow gives a tensor up to 128 MB more than it asks for."""

    def held():
        gc.collect()
        info = tf.config.experimental.get_memory_info
        return [info(device)["current"] for device in DEVICES[:2]]

    before = held()
    with kc.replicate(devices=2, shard=shard).scope():
        one = keras.Sequential([layers.Input((32768,)), layers.Dense(49152)])
    one.compile("adam", "mse")
    one.optimizer.build(one.trainable_variables)
    kc.replicate(one, devices=2, shard=shard)
    told = kc.memory(one).variables
    for now, then in zip(held(), before, strict=True):
        assert now - then == pytest.approx(told, rel=0.05)


class ValueOfBefore(keras.Model):
    """Asks a tape by a value that it does not know."""

    def train_step(self, data):
        x, y = data
        values = [each.value for each in self.trainable_variables]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply(tape.gradient(loss, values))
        return {"loss": loss}


@several
def test_a_value_that_was_read_before_the_tape_is_refused():
    given = layers.Input((WIDTH,))
    model = ValueOfBefore(given, layers.Dense(67)(given))
    kc.replicate(model, devices=2, shard="weights")
    model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match="before the tape"):
        model.fit(X, np.ones([len(X), 67]), batch_size=10, verbose=0)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_second_derivatives_by_weights(compiled):
    def run(*replicated):
        options = {"made": slopes_of_slopes, "jit_compile": compiled}
        return trained(optimizers.SGD(0.01), *replicated, **options)

    assert_equal(run(MANY, "weights"), run(), 5e-6)


@pytest.mark.long
def test_recomputation():
    def made():
        with keras.RematScope("full"):
            return model()

    found = trained(optimizers.Adam(0.01), 2, "weights", made)
    assert_equal(found, trained(optimizers.Adam(0.01)), TOLERANCE)


@pytest.mark.long
def test_models_that_are_made_in_parts():
    with kc.replicate(devices=MANY, shard="weights").scope():
        one = model()
        large = [v for v in one.weights if not is_whole(v)]
        whole = 4 * sum(v.shape.num_elements() for v in large)
        assert max(bytes_on_devices(large)) < whole / MANY + 4 * len(large)
        one.compile(optimizers.Adam(0.01), "mse")
    expected = trained(optimizers.Adam(0.01))
    history = one.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    assert_equal((one, history.history["loss"]), expected, TOLERANCE)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
def test_nothing_else_has_to_know(shard, tmp_path):
    one, _ = trained(optimizers.Adam(0.01), MANY, shard, metrics=["mae"])
    plain, _ = trained(optimizers.Adam(0.01), metrics=["mae"])
    lines: list[str] = []
    one.summary(print_fn=lines.append)
    expected: list[str] = []
    plain.summary(print_fn=expected.append)
    assert lines[1:] == expected[1:]
    assert one.count_params() == plain.count_params()
    for a, b in zip(one.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # Reading outside of replicas.
    one.set_weights(plain.get_weights())
    for a, b in zip(one.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    kernel = one.layers[0].kernel
    np.testing.assert_array_equal(kernel + 0, kernel.numpy())
    np.testing.assert_allclose(one(X), plain(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        one.predict(X, verbose=0),
        plain.predict(X, verbose=0),
        rtol=1e-6,  # GPUs may take another kernel for the same product
        atol=1e-6,
    )
    np.testing.assert_allclose(
        one.evaluate(X, Y, batch_size=10, verbose=0),
        plain.evaluate(X, Y, batch_size=10, verbose=0),
        rtol=1e-5,
    )
    # Files.
    one.save_weights(tmp_path / "a.weights.h5")
    one.save(tmp_path / "a.keras")
    for other in (model(), keras.saving.load_model(tmp_path / "a.keras")):
        other.load_weights(tmp_path / "a.weights.h5")
        for a, b in zip(other.weights, one.weights, strict=True):
            close(a, b, 0)
    for a, b in zip(
        other.optimizer.variables, one.optimizer.variables, strict=True
    ):
        close(a, b, 0)
    kernel.assign(kernel + 1)
    one.load_weights(tmp_path / "a.weights.h5")
    for a, b in zip(one.weights, other.weights, strict=True):
        close(a, b, 0)
    one.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(served.serve(X), plain(X), atol=1e-6)
    # On one device again, and on fewer.
    kc.unreplicate(one)
    for count, word in ((None, None), (2, "optimizer"), (2, "weights")):
        if count:
            kc.replicate(one, devices=count, shard=word)
        for a, b in zip(one.weights, other.weights, strict=True):
            close(a, b, 0)
        for a, b in zip(
            one.optimizer.variables, other.optimizer.variables, strict=True
        ):
            close(a, b, 0)
        kc.unreplicate(one)
    assert kc.in_sync(one)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_a_saved_model_has_no_parts_of_weights(shard, tmp_path):
    """In a program without replicas, each part would be the whole."""
    one = kc.replicate(model(), devices=2, shard=shard)
    one.compile(optimizers.Adam(0.01), "mse")
    one.optimizer.build(one.trainable_variables)
    spec = tf.TensorSpec((None, WIDTH))

    def archived(path):
        archive = keras.export.ExportArchive()
        archive.track(one)
        archive.add_endpoint("serve", one.call, input_signature=[spec])
        archive.write_out(path, verbose=False)

    def saved(path):
        signature = tf.function(one.call, input_signature=[spec])
        tf.saved_model.save(one, path, signatures={"serve": signature})

    for number, save in enumerate((archived, saved)):
        path = tmp_path / str(number)
        if shard == "weights":
            with pytest.raises(NotImplementedError, match=r"`model\.export`"):
                save(path)
            continue
        save(path)
        served = tf.saved_model.load(path).signatures["serve"]
        (found,) = served(tf.constant(X)).values()
        np.testing.assert_allclose(found, one(X), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
def test_files_have_the_bytes_of_one_device(shard, tmp_path):
    def saved(one):
        one.save_weights(tmp_path / "a.weights.h5")
        one.save(tmp_path / "a.keras")
        with zipfile.ZipFile(tmp_path / "a.keras") as archive:
            return (
                (tmp_path / "a.weights.h5").read_bytes(),
                archive.read("model.weights.h5"),
            )

    keras.backend.clear_session()
    one, _ = trained(optimizers.Adam(0.01))
    expected = saved(one)
    kc.replicate(one, devices=MANY, shard=shard)
    assert saved(one) == expected
    # What one device has left is read where each device has a part only.
    keras.backend.clear_session()
    with kc.replicate(devices=MANY, shard=shard).scope():
        other = model()
        other.compile(optimizers.Adam(0.01), "mse")
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "a.weights.h5")
    for a, b in zip(other.weights, one.weights, strict=True):
        close(a, b, 0)
    assert saved(other) == expected


@pytest.mark.long
@pytest.mark.parametrize("shard", SHARDS)
def test_a_training_is_resumed_on_other_devices(shard, tmp_path):
    def train(count, word, epochs):
        one = model()
        if count:
            kc.replicate(one, devices=count, shard=word)
        one.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
        history = one.fit(
            X,
            Y,
            batch_size=10,
            epochs=epochs,
            verbose=0,
            callbacks=[kc.Resume(tmp_path / str(word))],
        )
        return one, history.history["loss"]

    train(MANY, shard, 2)
    found, _ = train(2, SHARDS[shard == "optimizer"], 4)
    keras.utils.set_random_seed(0)
    expected = model()
    expected.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
    expected.fit(X, Y, batch_size=10, epochs=4, verbose=0)
    for a, b in zip(found.weights, expected.weights, strict=True):
        close(a, b, TOLERANCE)


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(optimizers, "ScheduleFreeAdamW"), reason="older Keras"
)
@pytest.mark.parametrize("shard", SHARDS)
def test_schedule_free_optimizers(shard):
    """They use a value that they have read before they write it."""

    def built():
        one = model()
        one.optimizer = optimizers.ScheduleFreeAdamW(0.01, weight_decay=0.1)
        one.optimizer.build(one.trainable_variables)
        return one

    def found(*ways):
        one = built()
        optimizer = one.optimizer
        for count, word in ways:
            kc.replicate(one, devices=count, shard=word)
        one.compile(optimizer, "mse")
        losses = one.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
        return one, losses.history["loss"]

    assert_equal(found((MANY, shard)), found(), TOLERANCE)


class Unknown(optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))


class Known(Unknown):
    conflux_elementwise = True


@pytest.mark.long
def test_optimizers_of_ones_own():
    with pytest.raises(NotImplementedError, match="conflux_elementwise = True"):
        trained(Unknown(0.01), MANY, "weights")
    found = trained(Known(0.001), MANY, "weights")
    assert_equal(found, trained(Known(0.001)), TOLERANCE)


def test_what_is_refused():
    one = model()
    with pytest.raises(ValueError, match=r"`shard` is .*Received: shard='all'"):
        kc.replicate(one, shard="all")
    with pytest.raises(TypeError, match="has no meaning for: ndarray"):
        kc.replicate(X, shard="weights")
    kc.replicate(one, devices=2, shard="weights")
    with pytest.raises(kc.StrategyError, match="unreplicate"):
        kc.replicate(one, devices=2, shard="optimizer")
    with pytest.raises(ValueError, match="there are no copies to reduce"):
        kc.allreduce("mean", one)
    with pytest.raises(ValueError, match="is sharded"):
        kc.synchronize(one, root=1)
    kc.synchronize(one)

    @kc.withdevices(devices=2)
    def step(x):
        with tf.GradientTape() as tape:
            nothing = tf.zeros([22, 3])
            loss = tf.cond(x[0, 0] > 9e9, lambda: nothing, lambda: one(x))
        return tape.gradient(loss, one.trainable_variables)

    x = kc.replicate(X, devices=2)
    with pytest.raises(kc.StrategyError, match="devices=2, shard='weights'"):
        step(x)
    with (
        kc.replicate(devices=2, shard="weights"),
        pytest.raises(NotImplementedError, match="not in a branch"),
    ):
        step(x)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
def test_other_loops(shard):
    """`train_on_batch`, steps that run eagerly, and loops of the user's."""
    one, other = model(), model()
    kc.replicate(one, devices=2, shard=shard)
    for each in (one, other):
        # By its usual epsilon, Adam divides gradients of 1e-6 by themselves:
        # one device would differ from itself with weights of another rounding.
        adam = optimizers.Adam(0.01, epsilon=1e-3, use_ema=True)
        each.compile(adam, "mse")
        for begin in (0, 7):
            each.train_on_batch(X[begin : begin + 7], Y[begin : begin + 7])
        each.compile(each.optimizer, "mse", run_eagerly=True)
        each.fit(X, Y, batch_size=11, verbose=0, shuffle=False)
    for a, b in zip(
        [*one.weights, *one.optimizer.variables],
        [*other.weights, *other.optimizer.variables],
        strict=True,
    ):
        close(a, b, TOLERANCE)

    def predicted(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = one(x)
        return y, tape.gradient(y, x)

    with kc.replicate(devices=2, shard=shard):
        found = kc.withdevices(predicted, devices=2)(kc.replicate(X, devices=2))
    for a, b in zip(found[1], predicted(tf.constant(X)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", SHARDS)
def test_averages_are_swapped(shard):
    """Keras hands a weight and its average to one function."""

    def swapped(*replicated):
        optimizer = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        one, losses = trained(optimizer, *replicated)
        callback = keras.callbacks.SwapEMAWeights()
        callback.set_model(one)
        callback.on_test_begin()
        return one, losses

    assert_equal(swapped(2, shard), swapped())


def swap(a, b):
    a.assign_add(b)
    b.assign(a - b)
    a.assign_sub(b)


def by_the_sum(a, b):
    """No part of the result follows from the same parts."""
    b.assign(b + tf.reduce_sum(a))
    a.assign_add(b)


def test_functions_that_are_handed_parts():
    """They run once, whichever of their arguments lies in parts."""
    one = keras.Sequential([layers.Input((WIDTH,))])
    one.add(layers.Dense(WIDTH, use_bias=False))
    one.add(layers.Dense(WIDTH, use_bias=False))
    adam = optimizers.Adam()
    adam.build(one.trainable_variables)
    for each in (one, adam):
        kc.replicate(each, devices=2, shard="optimizer")
    wholes = [each.value for each in one.weights]
    cut = [v.value for v in adam.variables if v.shape == (WIDTH, WIDTH)]
    strategy = cut[0].distribute_strategy

    def non_slot(a, function, args=(), kwargs=None):
        devices = strategy.extended.worker_devices
        strategy.extended.update_non_slot(devices, function, (a, *args), kwargs)

    def in_replica(a, function, args=(), kwargs=None):
        def update():
            context = tf.distribute.get_replica_context()
            context._update(a, function, args, kwargs or {}, False)

        with kc.replicate(devices=2, shard="optimizer"):
            kc.withdevices(update, devices=2)()

    first, second = X[:1] + np.eye(WIDTH), X[1:2] * np.eye(WIDTH)
    for update, function, a, b, by_name in itertools.product(
        (strategy.extended.update, non_slot, in_replica),
        (swap, by_the_sum),
        (wholes[0], cut[0]),
        (wholes[1], cut[1]),
        (False, True),
    ):
        expected = [
            tf.Variable(each, dtype="float32") for each in (first, second)
        ]
        function(*expected)
        a.assign(first)
        b.assign(second)
        given = {"kwargs": {"b": b}} if by_name else {"args": (b,)}
        update(a, function, **given)
        for found, want in zip((a, b), expected, strict=True):
            want = want.numpy()
            np.testing.assert_allclose(
                found.numpy(), want, rtol=1e-4, atol=1e-4
            )
    mean = strategy.reduce("MEAN", cut[0], axis=None)
    np.testing.assert_array_equal(mean, cut[0].numpy())


MADE_LATE = [
    "Adam, accumulation",
    "loss scaling",
    "Adafactor",
    "MultiOptimizer",
]


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("shard", [None, "optimizer", "weights"])
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("name", [x for x in MADE_LATE if x in OPTIMIZERS])
def test_optimizers_that_are_built_after_they_were_replicated(
    name, is_built, shard
):
    def gradients(one, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(one(x) - y))
        return tape.gradient(loss, one.trainable_variables)

    plain, optimizer = model(), OPTIMIZERS[name]()
    for _ in range(4):
        grads = gradients(plain, X, Y)
        optimizer.apply(grads, plain.trainable_variables)
    one = kc.replicate(model(), devices=2, shard=shard)
    late = kc.replicate(OPTIMIZERS[name](), devices=2, shard=shard)
    if is_built:
        late.build(one.trainable_variables)

    @kc.withdevices(devices=2)
    def step(x, y):
        grads = kc.allreduce("mean", gradients(one, x, y))
        late.apply(grads, one.trainable_variables)

    with kc.replicate(devices=2, shard=shard):
        for _ in range(4):
            step(*kc.split((X, Y), devices=2))
    for a, b in zip(
        [*one.weights, *late.variables],
        [*plain.weights, *optimizer.variables],
        strict=True,
    ):
        close(a, b, TOLERANCE)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_loop_outside_of_replicas(shard):
    """It runs eagerly, and its first update builds the optimizer."""
    found = []
    for devices in (None, 2):
        one, adam = model(), optimizers.Adam(0.01, epsilon=1e-3)
        if devices:
            kc.replicate(one, devices=devices, shard=shard)
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(one(X) - Y))
            grads = tape.gradient(loss, one.trainable_variables)
            adam.apply(grads, one.trainable_variables)
        found.append([*one.weights, *adam.variables])
    for a, b in zip(*found[::-1], strict=True):
        close(a, b, TOLERANCE)


def test_gradients_by_weights_in_replicas_that_run_eagerly():
    one, other = kc.replicate(model(), devices=2, shard="weights"), model()

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X) - Y))
        return tape.gradient(loss, model.trainable_variables)

    strategy = one.weights[0].value.distribute_strategy
    with strategy.scope():
        found = strategy.run(lambda: gradients(one))
    for each, expected in zip(found, gradients(other), strict=True):
        for own in strategy.experimental_local_results(each):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_norms_in_float64():
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        found, expected = (
            trained(optimizers.SGD(0.5, global_clipnorm=0.1), *replicated)
            for replicated in ((2, "optimizer"), ())
        )
        assert_equal(found, expected, 1e-11)
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


class LeftAfter(keras.callbacks.Callback):
    """Ends a training after so many steps, which are a setting."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.done = steps, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.steps:
            raise KeyboardInterrupt


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"), itertools.permutations([None, *SHARDS], 2)
)
@pytest.mark.sampled(2)
def test_an_accumulation_goes_on_in_other_parts(tmp_path, before, after):
    def run(steps, shard):
        one = keras.Sequential([layers.Input((WIDTH,)), layers.Dense(67)])
        one.add(layers.Dense(3))
        kc.replicate(one, devices=2, shard=shard)
        adam = optimizers.Adam(0.01, gradient_accumulation_steps=2)
        one.compile(adam, "mse")
        resume = kc.Resume(tmp_path, every=1)
        called = [LeftAfter(steps), resume]
        one.fit(X, Y, 4, 1, verbose=0, shuffle=False, callbacks=called)
        return one

    keras.utils.set_random_seed(1)
    with pytest.raises(KeyboardInterrupt):
        run(3, before)
    weights = run(99, after).get_weights()
    shutil.rmtree(tmp_path)
    keras.utils.set_random_seed(1)
    expected = run(99, None).get_weights()
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
def test_updates_in_a_loop_of_the_users(shard):
    one = kc.replicate(model(), devices=2, shard=shard)
    optimizer = kc.replicate(optimizers.Adam(0.01), devices=2, shard=shard)
    elsewhere = SHARDS[shard == "weights"]
    other, plain = model(), optimizers.Adam(0.01)

    def loss(model, x, y):
        return tf.reduce_mean(tf.square(model(x) - y))

    @kc.withdevices(devices=2)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(one, x, y)
        grads = tape.gradient(value, one.trainable_variables)
        grads = kc.allreduce("mean", grads, weight=len(x))
        optimizer.apply(grads, one.trainable_variables)

    x, y = (kc.Replicas([each[:9], each[9:]], 2) for each in (X, Y))
    with pytest.raises(kc.StrategyError, match=f"shard='{shard}'"):
        step(x, y)
    for _ in range(2):
        # The seeds of `keras.random` come back from there.
        kc.replicate(model(), devices=2, shard=elsewhere).predict(X, verbose=0)
        with (
            kc.replicate(devices=2, shard=shard),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", kc.ConfluxWarning)
            step(x, y)
        with tf.GradientTape() as tape:
            value = loss(other, X, Y)
        grads = tape.gradient(value, other.trainable_variables)
        plain.apply(grads, other.trainable_variables)
    for a, b in zip(one.weights, other.weights, strict=True):
        close(a, b, TOLERANCE)


CLIPPING = (
    {},
    {"clipvalue": 1e-3},
    {"clipnorm": 0.02},
    {"global_clipnorm": 0.05},
)
WAYS = (".weights.h5", ".keras", "kc.Resume", "in place")
ON_DEVICES = [*itertools.product(SEVERAL, SHARDS)]


def drawn_examples():
    if not hypothesis.settings.default.derandomize:
        return hypothesis.settings.default.max_examples
    return 16 if RUN_LONG_TESTS else 1


@pytest.mark.long
@hypothesis.settings(max_examples=drawn_examples())
@hypothesis.given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    clipping=st.sampled_from(CLIPPING),
    accumulated=st.sampled_from((None, 2, 3)),
    way=st.sampled_from(WAYS),
    before=st.sampled_from([*ON_DEVICES, (None, None)]),
    after=st.sampled_from(ON_DEVICES[::-1]),
)
def test_drawn_trainings_go_on_elsewhere(
    tmp_path_factory, name, clipping, accumulated, way, before, after
):
    """What has been trained in one way is trained on in another.

    It goes on in place, from a file, or by `kc.Resume`.
    """

    def made():
        optimizer = OPTIMIZERS[name]()
        for each in that_update(optimizer):
            for option, limit in clipping.items():
                setattr(each, option, limit)
            if accumulated:
                each.gradient_accumulation_steps = accumulated
        one = model()
        one.compile(optimizer, "mse")
        optimizer.build(one.trainable_variables)
        return one

    def fit(one, **options):
        one.fit(X, Y, batch_size=10, shuffle=False, verbose=0, **options)

    def train(*ways):
        folder, one = tmp_path_factory.mktemp("way"), made()
        for epochs, (count, shard) in enumerate(ways, 1):
            if count:
                kc.replicate(one, devices=count, shard=shard)
            if way == "kc.Resume":
                fit(one, epochs=epochs, callbacks=[kc.Resume(folder)])
            else:
                if epochs > 1 and way == ".weights.h5":
                    one.load_weights(folder / "a.weights.h5")
                fit(one)
            if epochs < len(ways):
                one = next_one(one, folder)
        return one

    def next_one(one, folder):
        if way == "in place":
            return kc.unreplicate(one)
        if way == ".keras":
            one.save(folder / "a.keras")
            return keras.saving.load_model(folder / "a.keras")
        if way == ".weights.h5":
            one.save_weights(folder / "a.weights.h5")
        return made()

    found = train(before, after)
    if way == "kc.Resume":
        expected = made()
        fit(expected, epochs=2)
    else:
        expected = train((None, None), (None, None))
    for a, b in zip(found.weights, expected.weights, strict=True):
        close(a, b, TOLERANCE)
    assert kc.in_sync(found)


@pytest.mark.long
def test_eight_devices():
    script = pathlib.Path(__file__).with_name("sharded_cases.py")
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, script, "8"], env=hidden, check=True)


@several
@pytest.mark.skipif(ON_GPU, reason="gradients are dense there")
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_rows_that_repeat_are_warned_of_where_they_count(shard, optimizer):
    ids = np.arange(48).reshape(12, 4) % 5

    def model():
        keras.utils.set_random_seed(1)
        made = keras.Sequential(
            [layers.Input((4,)), layers.Embedding(400, 33), layers.Dense(1)]
        )
        made.add(layers.Flatten())
        return made

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(optimizer, MANY, shard, model, ids, ids * 0.1)
    is_told = any("that repeat in a batch" in str(x.message) for x in told)
    assert is_told == (optimizer == "adam")
    if not is_told:
        assert_equal(found, trained(optimizer, made=model, x=ids, y=ids * 0.1))
