"""What users do around `fit` that once went wrong."""

import os
import random
import threading
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc

X, Y = regression(45)
FIT = dict(batch_size=16, shuffle=False, verbose=0)


@pytest.mark.long
def test_a_model_that_shares_layers_is_replicated_too():
    def build():
        keras.utils.set_random_seed(1)
        x = keras.Input((8,))
        code = keras.layers.Dense(4, "tanh")(x)
        encoder = keras.Model(x, code)
        full = keras.Model(x, keras.layers.Dense(1)(code))
        encoder.compile("sgd", "mse")
        full.compile("adam", "mse")
        return encoder, full

    one, many = build(), build()
    for encoder, _ in (one, many):
        encoder.predict(X, verbose=0)
    kc.replicate(many[1], MANY)
    for _, full in (one, many):
        full.fit(X, Y, epochs=2, **FIT)
    np.testing.assert_allclose(
        many[0].predict(X, verbose=0), one[0].predict(X, verbose=0), atol=1e-5
    )
    for encoder, _ in (one, many):
        encoder.fit(X, X[:, :4], **FIT)
    assert_same_training(one[0], many[0])
    kc.assert_in_sync(many[0])


class Counting(keras.layers.Layer):
    """Counts steps and samples, and adds up what it sees, in several ways."""

    def build(self, shape):
        def weight(name, dtype="float32"):
            return self.add_weight(
                (), "zeros", dtype, trainable=False, name=name
            )

        self.samples = weight("samples", "int32")
        self.steps = weight("steps")
        self.integers = weight("integers", "int32")
        self.taken = weight("taken")
        self.set = weight("set", "int32")

    def call(self, x):
        self.samples.assign_add(keras.ops.shape(x)[0])
        self.steps.assign_add(keras.ops.ones(()))
        self.integers.assign_add(np.int32(1))
        self.taken.assign_sub(keras.ops.sum(x))
        self.set.assign(self.set + 1)
        return x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["numpy", "whole batches", "batches"])
def test_what_layers_count(kind, count):
    x, y = X[:40], Y[:40]
    data = tf.data.Dataset.from_tensor_slices((x, y))
    fit = {
        "numpy": dict(x=x, y=y, batch_size=10, shuffle=False),
        "whole batches": dict(x=data.batch(10, drop_remainder=True)),
        "batches": dict(x=data.batch(9)),
    }[kind]

    def train(replicas=None):
        layer = Counting()
        model = keras.Sequential([layer, keras.layers.Dense(1)])
        # On GPUs XLA takes no integers of variables.
        model.compile("sgd", "mse", jit_compile=False)
        if replicas:
            kc.replicate(model, replicas)
        model.fit(**fit, verbose=0)
        return model, [float(w.numpy()) for w in layer.weights]

    _, expected = train()
    model, got = train(count)
    assert expected[0] == 40
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    kc.assert_in_sync(model)


def test_a_step_may_take_what_call_does_not():
    class Denoiser(keras.Sequential):
        def train_step(self, data):
            noisy = {"clean": data["x"] + data["noise"]}
            return super().train_step((noisy["clean"], data["x"]))

    def build():
        keras.utils.set_random_seed(1)
        model = Denoiser([keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        return model

    data = {"x": X, "noise": X[::-1] / 8}
    batches = tf.data.Dataset.from_tensor_slices(data).batch(16)
    one, many = build(), kc.replicate(build(), MANY)
    for model in (one, many):
        model.fit(batches, epochs=2, verbose=0)
    assert_same_training(one, many)


def test_summaries_of_a_step_are_written(tmp_path):
    class Model(keras.Sequential):
        def train_step(self, data):
            tf.summary.scalar("seen", 1.0, step=self.optimizer.iterations.value)
            return super().train_step(data)

    model = kc.replicate(Model([keras.layers.Dense(1)]), MANY)
    model.compile("sgd", "mse", jit_compile=False)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        model.fit(X, Y, **FIT)
    (path,) = tmp_path.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(path))
    tags = [value.tag for event in events for value in event.summary.value]
    assert tags == ["seen"] * 3


def test_a_shuffling_pydataset_shuffles_as_on_one_device():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 15

        def __getitem__(self, index):
            order.append(index)
            return X[index::15], Y[index::15]

    orders = []
    for replicate in (False, True):
        order = []
        orders.append(order)
        # Without Keras' own seed, its generators draw from Python's.
        keras.utils.clear_session()
        random.seed(3)
        model = dense("sgd")
        if replicate:
            kc.replicate(model, MANY)
        model.fit(Data(), epochs=3, shuffle=True, verbose=0)
    assert orders[1] == orders[0]


def test_two_models_train_at_once():
    expected = dense("adam")
    expected.fit(X, Y, epochs=5, **FIT)
    models = [kc.replicate(dense("adam"), MANY) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda m=m: m.fit(X, Y, epochs=5, **FIT))
        for m in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        assert_same_training(expected, model)
        kc.assert_in_sync(model)


@pytest.mark.sampled(2)
@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")),
    reason="on GPUs an index out of range is no error",
)
@pytest.mark.parametrize("several", [1, 2])
def test_a_bad_batch_leaves_the_model_usable(several):
    model = keras.Sequential(
        [
            keras.layers.Embedding(20, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", steps_per_execution=several)
    kc.replicate(model, MANY)
    ids = np.arange(96).reshape(32, 3) % 20
    bad = ids.copy()
    bad[-1] = 99
    model.fit(ids, Y[:32], **FIT)
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
            model.fit(bad, Y[:32], **FIT)
        kc.assert_in_sync(model)
        assert np.isfinite(model.fit(ids, Y[:32], **FIT).history["loss"][0])


@pytest.mark.long
def test_functions_run_eagerly():
    one, many = dense("adam"), kc.replicate(dense("adam"), MANY)
    one.fit(X, Y, **FIT)
    tf.config.run_functions_eagerly(True)
    try:
        many.fit(X, Y, **FIT)
    finally:
        tf.config.run_functions_eagerly(False)
    assert_same_training(one, many)


@pytest.mark.long
def test_generators_with_none_and_several_steps():
    def batches():
        while True:
            yield X[:16], Y[:16], None

    one = dense("adam")
    many = kc.replicate(dense("adam", steps_per_execution=2), MANY)
    for model in (one, many):
        model.fit(batches(), steps_per_epoch=4, verbose=0)
    assert_same_training(one, many)
    np.testing.assert_allclose(
        many.evaluate(batches(), steps=2, verbose=0),
        one.evaluate(batches(), steps=2, verbose=0),
        rtol=1e-5,
    )


@pytest.mark.long
def test_random_numbers_without_a_seed():
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    model = keras.Sequential(
        [keras.Input((8,)), Noise(), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    kc.replicate(model, MANY)
    model.fit(X, Y, **FIT)
    kc.assert_in_sync(model)
    noise = kc.withdevices(lambda: keras.random.normal((3,)), devices=MANY)
    drawn = [value.numpy().tobytes() for value in (*noise(), *noise())]
    assert len(set(drawn)) == 2 * MANY


@pytest.mark.long
def test_dropout_is_reproducible_and_goes_on():
    def build():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
        return kc.replicate(model, MANY)

    first, again, moved = build(), build(), build()
    for model in (first, again):
        model.fit(X, Y, epochs=2, **FIT)
    assert_same_training(first, again)
    # Seeds move with the model. (Keras' own files do not hold them.)
    moved.fit(X, Y, epochs=1, **FIT)
    kc.replicate(kc.unreplicate(moved), MANY)
    moved.fit(X, Y, epochs=1, **FIT)
    assert_same_training(first, moved)


def test_numbers_of_a_replicated_optimizer():
    model = kc.replicate(dense("adam"), MANY)
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-3)
    assert int(model.optimizer.iterations) == 0
    model.optimizer.build(model.trainable_variables)
    kc.assert_in_sync(model.optimizer)


def test_a_plain_loop_over_a_replicated_model():
    one, many = dense("adam"), kc.replicate(dense("adam"), MANY)
    for model in (one, many):
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X) - Y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(
                zip(grads, model.trainable_variables, strict=True)
            )
    assert_same_training(one, many)
    kc.assert_in_sync(many)


def test_no_call_chooses_the_devices_of_later_ones():
    kc.replicate(dense(), devices=1)
    kc.replicate(devices=1)
    kc.split(X, devices=1)
    kc.allreduce("sum", kc.Replicas([1.0], 1))
    model = kc.replicate(dense())
    assert model.distribute_strategy.devices == kc.devices()
    assert kc.split(X).devices == kc.devices()
    assert kc.withdevices(lambda: 1)().devices == kc.devices()
    with kc.replicate(devices=1):
        assert kc.split(X).devices == DEVICES[:1]


@pytest.mark.long
@pytest.mark.parametrize("aggregation", ["none", "sum"])
def test_sums_and_counts_that_layers_keep(aggregation):
    class Sums(keras.layers.Layer):
        def build(self, shape):
            add = dict(trainable=False, initializer="zeros")
            self.total = self.add_weight(
                shape=(8,), aggregation=aggregation, **add
            )
            self.count = self.add_weight(shape=(), dtype="int32", **add)
            self.calls = self.add_weight(shape=(), dtype="int32", **add)

        def call(self, x):
            self.total.assign_add(keras.ops.sum(x, axis=0))
            self.count.assign_add(keras.ops.shape(x)[0])
            self.calls.assign_add(1)
            return x

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((8,)), Sums(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=False)
        return model

    one, many = build(), kc.replicate(build(), MANY)
    for model in (one, many):
        model.fit(X, Y, epochs=2, **FIT)
    for expected, got in zip(one.weights, many.weights, strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=1e-4)
    kc.assert_in_sync(many)


@pytest.mark.long
def test_metrics_of_batch_means():
    def root(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))

    one = dense("adam", metrics=[root])
    many = kc.replicate(dense("adam", metrics=[root]), MANY)
    logs = [m.fit(X[:18], Y[:18], epochs=2, **FIT) for m in (one, many)]
    assert_same_training(one, many, *logs)


def test_predict_in_order(count):
    model = kc.replicate(dense(), count)
    expected = dense().predict(X, verbose=0)
    for batch in (45, 16, 7, 1):
        got = model.predict(X, batch_size=batch, verbose=0)
        np.testing.assert_allclose(got, expected, atol=1e-5)


class OwnFunction(keras.Sequential):
    """Makes a train function of its own, or wraps Keras'."""

    wraps = False

    def make_train_function(self, force=False):
        if self.wraps:
            super().make_train_function(force)
            inner, self.calls = self.train_function, []

            def function(iterator):
                self.calls.append(1)
                return inner(iterator)
        else:

            def function(iterator):
                return self.train_step(next(iterator))

        self.train_function = function
        return function


def test_a_train_function_of_ones_own_may_wrap_but_not_replace():
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    for wraps in (True, False):
        model = OwnFunction([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.wraps = wraps
        kc.replicate(model, MANY)
        if wraps:
            model.fit(x, y, batch_size=4, verbose=0)
            assert len(model.calls) == 2
        else:
            with pytest.raises(kc.StrategyError, match="make_train_function"):
                model.fit(x, y, batch_size=4, verbose=0)


class Count(keras.metrics.Metric):
    """Counts samples, and returns its variable in some way."""

    def __init__(self, show):
        super().__init__(name="count")
        self.show = show
        self.n = self.add_variable(shape=(), initializer="zeros", name="n")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.n.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.show(self.n)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "show",
    [lambda n: n, lambda n: n.value, lambda n: {"twice": n + n, "n": n.value}],
    ids=["variable", "value", "dict"],
)
def test_a_metric_may_return_its_variable(show):
    logs = []
    for replicate in (False, True):
        model = dense("sgd", metrics=[Count(show)])
        if replicate:
            kc.replicate(model, MANY)
        history = model.fit(X, Y, validation_data=(X, Y), **FIT).history
        result = model.evaluate(X, Y, return_dict=True, verbose=0)
        batch = model.train_on_batch(X[:16], Y[:16], return_dict=True)
        logs.append((history, result, keras.tree.map_structure(float, batch)))
    one, many = (keras.tree.flatten(each) for each in logs)
    np.testing.assert_allclose(many, one, rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.1),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_a_plain_optimizer_in_a_loop_over_a_replicated_model(make, traced):
    one, many = dense(), kc.replicate(dense(), MANY)
    for model in (one, many):
        optimizer = make()

        def step(model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X) - Y) ** 2)
            weights = model.trainable_variables
            grads = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(grads, weights, strict=True))

        run = tf.function(step) if traced else step
        for _ in range(3):
            run()
    assert_same_training(one, many)
    kc.assert_in_sync([many, optimizer])


@pytest.mark.parametrize("how", ["scope", "distribution"])
def test_a_model_is_made_in_a_function_that_xla_compiles(how):
    expected = dense()(X)
    names = [f"{d.kind.lower()}:{d.ordinal}" for d in kc.devices(MANY)]
    parallel = keras.distribution.DataParallel(devices=names)
    strategy = kc.replicate(devices=MANY)
    models = []

    @tf.function(jit_compile=True)
    def predict(x):
        if not models:
            models.append(dense())
        return models[0](x)

    with strategy if how == "scope" else parallel.scope():
        got = predict(tf.constant(X))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert models[0].distribute_strategy is strategy


@pytest.mark.long
def test_variables_of_a_loss_scale_optimizer_have_their_names():
    paths = []
    for replicate in (False, True):
        keras.utils.clear_session()
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        model = dense(keras.optimizers.LossScaleOptimizer(inner))
        if replicate:
            kc.replicate(model, MANY)
        model.fit(X, Y, **FIT)
        paths.append([each.path for each in model.optimizer.variables])
    assert paths[1] == paths[0]


class Mapping(keras.Model):
    """Maps a function over samples that may have a mistake."""

    def __init__(self, is_wrong):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 8))
        self.built = True
        self.is_wrong = is_wrong

    def each(self, x):
        if self.is_wrong:
            raise ValueError("a mistake")
        return 2 * x

    def call(self, x):
        return self.dense(tf.map_fn(self.each, x))


def test_a_mistake_in_a_mapped_function_can_be_mended():
    models = []
    for is_wrong in (True, False, False):
        keras.utils.set_random_seed(1)
        model = Mapping(is_wrong)
        model.compile("adam", "mse")
        models.append(model)
    wrong, one, many = models
    with pytest.raises(ValueError, match="a mistake"):
        wrong.fit(X, Y, **FIT)
    kc.replicate(many, MANY)
    assert_same_training(one, many, one.fit(X, Y, **FIT), many.fit(X, Y, **FIT))


@pytest.mark.parametrize("filtering", [True, False])
def test_frames_of_the_package_are_left_out_as_those_of_keras(filtering):
    class Wrong(keras.Model):
        def train_step(self, data):
            raise KeyError("of the user")

    package = os.path.dirname(kc.__file__)
    calls = {
        "fit": lambda model: model.fit(X, Y, **FIT),
        "evaluate": lambda model: model.evaluate("no data"),
        "call": lambda model: model.layers[-1](np.zeros((1, 3))),
        "compile": lambda model: model.compile("no optimizer"),
    }
    if not filtering:
        keras.config.disable_traceback_filtering()
    try:
        for name, call in calls.items():
            model = kc.replicate(Wrong() if name == "fit" else dense())
            model.compile("sgd", "mse", jit_compile=False)
            with pytest.raises(Exception) as caught:  # noqa: PT011
                call(model)
            frames = traceback.extract_tb(caught.value.__traceback__)
            files = [frame.filename for frame in frames]
            ours = [each for each in files if each.startswith(package)]
            assert bool(ours) is not filtering, (name, files)
    finally:
        keras.config.enable_traceback_filtering()


def test_lines_of_tensorflow_that_are_not_true_are_kept_back(caplog):
    caplog.set_level("INFO", "tensorflow")
    for count in range(1, MANY + 1):
        strategy = kc.ReplicatedStrategy(count)
        with strategy.scope():
            mean = keras.metrics.Mean()
            total = tf.Variable(
                1.0,
                aggregation=tf.VariableAggregation.SUM,
                synchronization=tf.VariableSynchronization.ON_READ,
            )
        losses = strategy.run(lambda: tf.constant(1.0))
        assert float(strategy.reduce("SUM", losses, axis=None)) == count
        mean.result()
        total.read_value()
        strategy.gather(strategy.run(lambda: tf.ones(2)), axis=0)
    for line in "MirroredStrategy", "Reduce to", "Gather to":
        assert line not in caplog.text
    tf.distribute.MirroredStrategy(["CPU:0"])
    tf.get_logger().info("Reduce to the user's own line.")
    assert "Using MirroredStrategy with devices" in caplog.text
    assert "user's own line" in caplog.text
