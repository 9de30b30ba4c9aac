"""`fit` on several devices against one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import COUNTS
from conftest import MANY
from models import assert_same_training
from models import dense
from models import regression
from models import weights

import keras_conflux as kc

FIT = dict(batch_size=16, shuffle=False, verbose=0)
X, Y = regression()

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "adamw": lambda: keras.optimizers.AdamW(1e-2),
}


@pytest.fixture(scope="module")
def single():
    """Trains on one device once, for all device counts."""
    trained = {}

    def train(name):
        if name not in trained:
            model = dense(OPTIMIZERS[name]())
            logs = model.fit(X, Y, epochs=3, validation_data=(X, Y), **FIT)
            trained[name] = model, logs
        return trained[name]

    return train


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("adam", count) for count in COUNTS),
        pytest.param("sgd", MANY, marks=pytest.mark.long),
        pytest.param("adamw", MANY, marks=pytest.mark.long),
    ],
)
def test_fit_equals_one_device(name, count, single):
    one, one_logs = single(name)
    many = kc.replicate(dense(OPTIMIZERS[name]()), count)
    many_logs = many.fit(X, Y, epochs=3, validation_data=(X, Y), **FIT)
    assert_same_training(one, many, one_logs, many_logs)
    kc.assert_in_sync(many)
    np.testing.assert_allclose(
        many.predict(X, batch_size=16, verbose=0),
        one.predict(X, batch_size=16, verbose=0),
        atol=1e-5,
    )
    assert int(many.optimizer.iterations) == int(one.optimizer.iterations)


def test_float64_is_equal_to_its_roundings():
    models = []
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        for count in (None, MANY):
            model = dense("adam", jit_compile=False)
            if count:
                kc.replicate(model, count)
            model.fit(X, Y, **FIT)
            models.append(model)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    for one, many in zip(*map(weights, models), strict=True):
        assert many.dtype == "float64"
        np.testing.assert_allclose(many, one, rtol=1e-11, atol=1e-13)


def test_a_model_built_in_the_scope(single):
    one, one_logs = single("adam")
    with kc.replicate(devices=MANY):
        many = dense(OPTIMIZERS["adam"]())
    many_logs = many.fit(X, Y, epochs=3, validation_data=(X, Y), **FIT)
    assert_same_training(one, many, one_logs, many_logs)


@pytest.mark.long
def test_compiled_and_built_after_replicate(single):
    one, one_logs = single("adam")
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    )
    many = kc.replicate(model, MANY)
    many.compile(OPTIMIZERS["adam"](), "mse", metrics=["mae"])
    many_logs = many.fit(X, Y, epochs=3, validation_data=(X, Y), **FIT)
    assert_same_training(one, many, one_logs, many_logs)
    kc.assert_in_sync(many)


@pytest.mark.long
def test_promotion_midway_and_back():
    one, many = dense("adam"), dense("adam")
    for model in (one, many):
        model.fit(X, Y, epochs=1, **FIT)
    kc.replicate(many, MANY)
    for model in (one, many):
        model.fit(X, Y, epochs=1, **FIT)
    assert_same_training(one, many)
    assert kc.unreplicate(many) is many
    assert many.distribute_strategy.num_replicas_in_sync == 1
    for model in (one, many):
        model.fit(X, Y, epochs=1, **FIT)
    assert_same_training(one, many)


def test_metric_state_survives_promotion():
    model = dense()
    model.train_on_batch(X, Y)
    before = model.get_metrics_result()
    kc.replicate(model, MANY)
    for name, value in model.get_metrics_result().items():
        np.testing.assert_allclose(value, before[name], rtol=1e-6)
    kc.unreplicate(model)
    for name, value in model.get_metrics_result().items():
        np.testing.assert_allclose(value, before[name], rtol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("saved_on", "loaded_on"), [(1, MANY), (MANY, 1), (MANY, MANY)]
)
def test_save_and_load(tmp_path, saved_on, loaded_on):
    one = dense("adam")
    one.fit(X, Y, epochs=2, **FIT)
    model = dense("adam")
    if saved_on > 1:
        kc.replicate(model, saved_on)
    model.fit(X, Y, epochs=1, **FIT)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    if loaded_on > 1:
        kc.replicate(loaded, loaded_on)
    np.testing.assert_allclose(weights(loaded), weights(model), atol=1e-7)
    loaded.fit(X, Y, epochs=1, **FIT)
    assert_same_training(one, loaded)
    loaded.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(weights(loaded), weights(model), atol=1e-7)
    kc.assert_in_sync(loaded)


@pytest.mark.long
def test_subclassed_model_with_synchronized_statistics():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            # A bias before a normalization has no gradient but rounding,
            # which Adam would scale up to a full step.
            self.hidden = keras.layers.Dense(16, use_bias=False)
            self.norm = keras.layers.BatchNormalization(synchronized=True)
            self.out = keras.layers.Dense(1)

        def call(self, x, training=False):
            x = self.norm(self.hidden(x), training=training)
            return self.out(keras.ops.relu(x))

    def build():
        keras.utils.set_random_seed(1)
        model = Net()
        model.compile("adam", "mse")
        return model

    one, many = build(), kc.replicate(build(), MANY)
    logs = [model.fit(X, Y, epochs=3, **FIT) for model in (one, many)]
    assert_same_training(one, many, *logs)
    kc.assert_in_sync(many)


def test_unsynchronized_statistics_are_averaged():
    keras.utils.set_random_seed(1)
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([norm, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kc.replicate(model, MANY)
    mean, variance = np.zeros(8), np.ones(8)
    for samples in (16, 3, 1):  # fewer than one a device, too
        x = X[:samples]
        model.fit(x, Y[:samples], **FIT)
        parts = [part for part in np.array_split(x, MANY) if len(part)]
        shares = [len(part) / samples for part in parts]
        means = np.average([part.mean(0) for part in parts], 0, shares)
        variances = np.average([part.var(0) for part in parts], 0, shares)
        mean = norm.momentum * mean + (1 - norm.momentum) * means
        variance = norm.momentum * variance + (1 - norm.momentum) * variances
    np.testing.assert_allclose(norm.moving_mean, mean, atol=1e-7)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-6)
    kc.assert_in_sync(model)
    assert np.all(np.isfinite(weights(model)))


@pytest.mark.long
def test_steps_per_execution_and_datasets():
    one = dense("adam")
    expected = one.fit(X, Y, epochs=2, **FIT)
    many = dense("adam", steps_per_execution=3)
    kc.replicate(many, MANY)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    got = many.fit(dataset, epochs=2, verbose=0)
    assert_same_training(one, many, expected, got)


def test_export_serves_the_same(tmp_path):
    model = kc.replicate(dense(), MANY)
    model.fit(X, Y, **FIT)
    model.export(tmp_path / "served", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(
        loaded.serve(X), model.predict(X, verbose=0), atol=1e-6
    )


def test_on_batch_methods_split_the_batch():
    one, many = dense("adam"), kc.replicate(dense("adam"), MANY)
    for model in (one, many):
        model.train_on_batch(X, Y)
    assert_same_training(one, many)
    np.testing.assert_allclose(
        many.test_on_batch(X, Y), one.test_on_batch(X, Y), rtol=1e-5
    )
    predicted = many.predict_on_batch(X)
    assert predicted.shape == (len(X), 1)
    np.testing.assert_allclose(predicted, one.predict_on_batch(X), atol=1e-5)


def test_dropout_differs_between_replicas():
    """And that of the first is what one device draws."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dropout(0.5)]
    )
    expected = model(tf.ones((1, 64)), training=True)
    keras.utils.set_random_seed(0)
    model = keras.models.clone_model(model)
    kc.replicate(model, MANY)
    masks = kc.withdevices(
        lambda: model(tf.ones((1, 64)), training=True), devices=MANY
    )()
    assert len({mask.numpy().tobytes() for mask in masks}) == MANY
    np.testing.assert_array_equal(masks[0], expected)


@pytest.mark.long
def test_a_failing_step_leaves_the_model_usable():
    model = dense("adam", run_eagerly=False)
    kc.replicate(model, MANY)
    with pytest.raises(Exception, match=r"shape|compatible"):
        model.fit(X[:, :3], Y, **FIT)
    one = dense("adam")
    expected = one.fit(X, Y, **FIT)
    assert_same_training(one, model, expected, model.fit(X, Y, **FIT))


def test_an_interrupt_of_a_build_ends_that_build_alone(monkeypatch):
    initialize = keras.Variable._deferred_initialize

    def interrupted(variable):
        initialize(variable)
        raise KeyboardInterrupt

    model = kc.replicate(dense(), MANY)
    with monkeypatch.context() as patched:
        patched.setattr(keras.Variable, "_deferred_initialize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, **FIT)
    one, other = dense(), kc.replicate(dense(), MANY)
    assert_same_training(
        one, other, one.fit(X, Y, **FIT), other.fit(X, Y, **FIT)
    )
    assert np.isfinite(model.fit(X, Y, **FIT).history["loss"]).all()
