"""With `run_eagerly=True` a step is that of one device, bit by bit."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import CASES
from cases_trained import train
from conftest import COUNTS
from conftest import MANY
from conftest import ON_GPU
from keras import layers
from keras import ops
from keras import optimizers
from models import assert_same_training
from models import dense
from models import outcome
from models import regression

import keras_conflux as kc

pytestmark = pytest.mark.usefixtures("deterministic")
X, Y = regression(45)  # of 16 a batch: the last has 13
FIT = {"batch_size": 16, "shuffle": False, "verbose": 0}


def assert_equal_bits(expected, got):
    assert len(expected) == len(got)
    for (name, one), many in zip(expected.items(), got.values(), strict=True):
        np.testing.assert_array_equal(many, one, err_msg=name)


def compiled(*inner, model=keras.Sequential, optimizer="adam", **options):
    built = model([keras.Input((8,)), *inner, layers.Dense(2)])
    options = {"loss": "mse", "run_eagerly": True} | options
    built.compile(optimizer, **options)
    return built


def _contrastive(y, p):
    similar = ops.matmul(p, ops.transpose(p))
    root = ops.sqrt(ops.mean(ops.square(similar)) + 0.1)
    return root - ops.mean(ops.log_softmax(similar, 0))


def _in_numpy(y, p):
    weights = 1 + np.abs(np.asarray(y)).mean(-1)
    return ops.mean(ops.square(y - p), -1) * weights


def _numpy_metric(y, p):
    return np.abs(np.asarray(y) - np.asarray(p)).mean(-1)


class Signs(layers.Layer):
    """Computes with NumPy, and by the whole batch."""

    def call(self, x):
        return x * np.sign(np.asarray(x)).mean()

    def compute_output_shape(self, shape):
        return shape


class Counts(layers.Layer):
    """Keeps what a step shows of its batch."""

    def build(self, shape):
        zeros = {"initializer": "zeros", "trainable": False}
        self.count = self.add_weight(shape=(), **zeros)
        self.largest = self.add_weight(shape=shape[1:], **zeros)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(float(x.shape[0]))
            self.largest.assign(0.9 * self.largest + ops.max(x, 0))
        return x - ops.mean(x, 0)


class OneDevicesStep(keras.Sequential):
    """Asks TensorFlow what only one device would answer like this."""

    def train_step(self, data):
        x, y = data
        strategy = tf.distribute.get_strategy()
        with tf.GradientTape() as tape:
            errors = ops.mean(ops.square(self(x, training=True) - y), -1)
            loss = tf.nn.compute_average_loss(errors)
            loss /= strategy.num_replicas_in_sync
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, "rows": ops.shape(x)[0]}


class TracedStep(keras.Sequential):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class WritesWhatNoLayerHolds(keras.Sequential):
    def __init__(self, *args):
        super().__init__(*args)
        kept = keras.Variable(0.5)
        self.seen = lambda: kept

    def train_step(self, data):
        self.seen().assign_add(ops.sum(data[0]))
        return super().train_step(data) | {"seen": self.seen().value + 0}


class Gan(keras.Model):
    """Has two optimizers, and no `call`."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Dense(8)])
        self.judge = keras.Sequential([layers.Dropout(0.3), layers.Dense(1)])
        self.of_maker = optimizers.Adam(0.01)
        self.of_judge = optimizers.RMSprop(0.01)
        self.mean = keras.metrics.Mean(name="mean")
        self.seeds = keras.random.SeedGenerator(3)
        self.compile(run_eagerly=True)

    def train_step(self, data):
        x, _ = data
        noise = keras.random.normal((ops.shape(x)[0], 4), seed=self.seeds)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            true, false = (
                self.judge(x, training=True),
                self.judge(self.maker(noise)),
            )
            lost = loss(true * 0 + 1, true) + loss(false * 0, false)
        weights = self.judge.trainable_variables
        self.of_judge.apply(tape.gradient(lost, weights), weights)
        with tf.GradientTape() as tape:
            false = self.judge(self.maker(noise), training=True)
            fooled = loss(false * 0 + 1, false)
        weights = self.maker.trainable_variables
        gradients = tape.gradient(fooled, weights)
        self.of_maker.apply_gradients(zip(gradients, weights, strict=True))
        self.mean.update_state(lost)
        return {"mean": self.mean.result(), "fooled": fooled}


def _lazy():
    model = keras.Sequential([layers.Dense(6), Signs(), layers.Dense(2)])
    metrics = ["mae", keras.metrics.R2Score()]
    model.compile("adam", _contrastive, metrics=metrics, run_eagerly=True)
    return model


def _accumulating(**options):
    return optimizers.Adam(0.01, gradient_accumulation_steps=2, **options)


PROGRAMS = {
    "samples compared": lambda: compiled(loss=_contrastive),
    "NumPy in a loss": lambda: compiled(loss=_in_numpy),
    "NumPy in a metric": lambda: compiled(metrics=[_numpy_metric, "mae"]),
    "NumPy in a layer": lambda: compiled(Signs()),
    "built by its first step": _lazy,
    "normalization": lambda: compiled(layers.BatchNormalization()),
    "synchronized normalization": lambda: compiled(
        layers.BatchNormalization(synchronized=True)
    ),
    "what a layer keeps": lambda: compiled(Counts()),
    "dropout": lambda: compiled(layers.Dropout(0.5), layers.GaussianNoise(0.1)),
    "area under a curve": lambda: compiled(
        layers.Dense(2, "sigmoid"),
        metrics=[keras.metrics.AUC(thresholds=[0.2, 0.5])],
    ),
    "accumulation": lambda: compiled(optimizer=_accumulating(use_ema=True)),
    "accumulation, loss scale": lambda: compiled(
        optimizer=optimizers.LossScaleOptimizer(
            _accumulating(), dynamic_growth_steps=2
        )
    ),
    "several steps": lambda: compiled(steps_per_execution=2),
    "a step of TensorFlow's distribution": lambda: compiled(
        model=OneDevicesStep
    ),
    "a traced step": lambda: compiled(model=TracedStep),
    "a variable that no layer holds": lambda: compiled(
        model=WritesWhatNoLayerHolds
    ),
    "two optimizers": Gan,
}


def trained(build, count=None, **options):
    """Trains, evaluates and predicts, and returns all that it leaves."""
    keras.utils.set_random_seed(1)
    model = build()
    if count:
        kc.replicate(model, count)
    y = np.tile(Y > 0, (1, 2)).astype("float32")
    history = model.fit(X, y, epochs=2, **FIT, **options)
    kc.assert_in_sync(model)
    found = outcome(model, history)
    if not isinstance(model, Gan):
        shown = model.evaluate(X[:21], y[:21], batch_size=16, verbose=0)
        found["evaluated"] = np.ravel(shown)
        found["predicted"] = model.predict(X[:21], batch_size=16, verbose=0)
    return found


@functools.cache
def on_one_device(name):
    return trained(PROGRAMS[name])


def runs():
    """Yields programs and numbers of replicas, in CI 2 and 3 by turns."""
    for position, name in enumerate(PROGRAMS):
        for count in COUNTS:
            is_long = not ON_GPU and count != 2 + position % 2
            marks = [pytest.mark.long] * is_long
            yield pytest.param(name, count, marks=marks)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("error::keras_conflux.ConfluxWarning")
@pytest.mark.parametrize(("name", "count"), [*runs()])
def test_a_program(name, count):
    got = trained(PROGRAMS[name], count)
    assert_equal_bits(on_one_device(name), got)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_a_case(name):
    """All that is compared in graphs; rows that repeat are added otherwise."""

    def prepare(model):
        model.run_eagerly = True

    keras.utils.set_random_seed(1)
    expected = train(name, prepare=prepare)
    keras.utils.set_random_seed(1)
    got = train(name, MANY, prepare=prepare)
    if name.startswith("rows that repeat"):
        for one, many in zip(expected.values(), got.values(), strict=True):
            np.testing.assert_allclose(many, one, rtol=1e-6, atol=1e-7)
    else:
        assert_equal_bits(expected, got)


def test_single_batches(count):
    results = []
    for replicas in (None, count):
        keras.utils.set_random_seed(1)
        model = dense("adam", metrics=["mae"], run_eagerly=True)
        if replicas:
            kc.replicate(model, replicas)
        found = [
            model.train_on_batch(X[:13], Y[:13]),
            model.train_on_batch(X[13:16], Y[13:16]),
            model.test_on_batch(X[:1], Y[:1]),
            model.predict_on_batch(X[:7]),
        ]
        results.append(dict(enumerate(found)) | outcome(model))
    assert_equal_bits(*results)


@pytest.mark.long
def test_modes_change_between_calls():
    """What one has accumulated, the other goes on with."""

    def run(count=None):
        keras.utils.set_random_seed(1)
        model = dense(optimizers.SGD(0.01, gradient_accumulation_steps=2))
        if count:
            kc.replicate(model, count)
        for eager in (True, False, True, False):
            tf.config.run_functions_eagerly(eager)
            try:
                model.fit(X, Y, **FIT)
                predicted = model.predict(X[:5], verbose=0)
            finally:
                tf.config.run_functions_eagerly(False)
        return model, predicted

    (one, expected), (many, got) = run(), run(MANY)
    assert_same_training(one, many)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


class Once(optimizers.SGD):
    updates = 0

    def update_step(self, gradient, variable, learning_rate):
        Once.updates += 1
        super().update_step(gradient, variable, learning_rate)


class Called(layers.Layer):
    times = 0

    def call(self, x):
        Called.times += 1
        return x


class OfLayers(keras.Model):
    def __init__(self):
        super().__init__()
        self.called, self.dense = Called(), layers.Dense(1)

    def call(self, x):
        return self.dense(self.called(x))


@pytest.mark.parametrize("call", ["fit", "predict"])
def test_code_of_the_users_runs_as_often(call):
    counts = []
    for replicas in (None, MANY):
        model = OfLayers()
        model.compile(Once(0.1), "mse", run_eagerly=True)
        if replicas:
            kc.replicate(model, replicas)
        Once.updates = Called.times = 0
        if call == "fit":
            model.fit(X[:32], Y[:32], **FIT)
        else:
            model.predict(X[:32], batch_size=16, verbose=0)
        counts.append((Once.updates, Called.times))
    assert counts[0] == counts[1]
    kc.assert_in_sync(model)


@pytest.mark.long
def test_rows_that_repeat_leave_copies_equal():
    rng = np.random.default_rng(0)  # enough rows for several threads
    rows = rng.integers(0, 100, (20_000, 1))
    model = keras.Sequential([layers.Embedding(100, 32), layers.Flatten()])
    model.compile(optimizers.SGD(0.1), "mse", run_eagerly=True)
    kc.replicate(model, MANY)
    targets = rng.normal(size=(20_000, 32)).astype("float32")
    model.fit(rows, targets, batch_size=20_000, epochs=20, verbose=0)
    kc.assert_in_sync(model)


class Exchanges(keras.Sequential):
    """Calls each collective, of which a replica alone gets what it gives."""

    alone = True

    def train_step(self, data):
        x, y = data
        this = kc.replica()
        assert (this.index, this.count) == (0, 1)
        x = kc.allgather(kc.allreduce("mean", x))
        y = kc.broadcast(kc.reduce("max", {"y": y}))["y"]
        kc.allreduce("sum", self)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = ops.sum(kc.allreduce("sum", x) ** 2)
        np.testing.assert_array_equal(tape.gradient(total, x), 2 * x)
        assert kc.allgather(tf.constant(1.0)).shape == (1,)
        return super().train_step((x, y))


def test_collectives_are_those_of_one_replica():
    expected = trained(compiled)
    got = trained(lambda: compiled(model=Exchanges), MANY)
    assert_equal_bits(expected, got)


@pytest.mark.long
@pytest.mark.parametrize("where", ["in a scope", "under a distribution"])
def test_scopes_do_not_reach_a_step(where):
    def build():
        inner = Counts(), layers.Dropout(0.2)
        return compiled(*inner, model=OneDevicesStep)

    one = trained(build)
    keras.utils.set_random_seed(1)
    strategy = kc.replicate(devices=MANY)
    with contextlib.ExitStack() as stack:
        if where == "in a scope":
            stack.enter_context(strategy.scope())
        else:
            devices = [str(each).lower() for each in strategy.devices]
            distribution = keras.distribution.DataParallel(devices=devices)
            stack.enter_context(distribution.scope())
        many = trained(build)
    assert_equal_bits(one, many)


def test_shards_of_a_distributed_dataset_are_joined():
    data = tf.data.Dataset.from_tensor_slices((X[:36], Y[:36])).batch(12)
    results = []
    for replicas in (None, MANY):
        keras.utils.set_random_seed(1)
        model = dense("adam", run_eagerly=True)
        given = data
        if replicas:
            strategy = kc.replicate(model, replicas).distribute_strategy
            given = strategy.experimental_distribute_dataset(data)
        results.append(outcome(model, model.fit(given, verbose=0)))
    assert_equal_bits(*results)


class Fails(keras.callbacks.Callback):
    """Raises at the end of a step, counted over all epochs."""

    def __init__(self, step):
        super().__init__()
        self.step, self.steps = step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            raise InterruptedError


@pytest.mark.long
def test_what_computes_in_numpy_is_resumed(tmp_path):
    def build():
        return compiled(
            loss=_in_numpy, metrics=[_numpy_metric], optimizer=_accumulating()
        )

    callbacks = [kc.Resume(tmp_path, every=1), Fails(5)]
    with pytest.raises(InterruptedError):
        trained(build, MANY, callbacks=callbacks)
    resume = kc.Resume(tmp_path, every=1)
    got = trained(build, MANY, callbacks=[resume, Fails(None)])
    assert resume.resumed_at[0] == 1
    assert_equal_bits(trained(build), got)
