"""`keras.distribution` does on TensorFlow what it says."""

import inspect
import logging
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc
from keras_conflux._cluster import processes
from keras_conflux._cluster.cluster import Cluster
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._replication.strategy import distribution_strategy

KIND = DEVICES[0].kind.lower()
NAMES = [f"{KIND}:{device.ordinal}" for device in DEVICES]
FIT = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}

# Keras 3.16 ends a distribution as its users do, so that nobody can tell.
says_so = pytest.mark.skipif(
    "set_distribution" in inspect.getsource(keras.utils.clear_session),
    reason="this version of Keras ends it by set_distribution",
)


@pytest.fixture(autouse=True)
def _no_distribution():
    yield
    keras.distribution.set_distribution(None)


def data_parallel(count: int = MANY) -> keras.distribution.DataParallel:
    return keras.distribution.DataParallel(devices=NAMES[:count])


def devices_of(model: keras.Model) -> tuple[kc.Device, ...]:
    """Returns the devices of a model whose variables all have copies there."""
    strategy = model.distribute_strategy
    if not isinstance(strategy, kc.ReplicatedStrategy):
        return ()
    for variable in [*model.weights, *model.metrics_variables]:
        assert keras_variables.backing(variable).distribute_strategy is strategy
    return strategy.devices


def digits(samples: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Returns images of shape (samples, 6, 6, 1) and one-hot labels."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(samples, 6, 6, 1)).astype("float32")
    return images, np.eye(10, dtype="float32")[rng.integers(0, 10, samples)]


def classifier(dropout: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 6, 1))
    y = keras.layers.Flatten()(inputs)
    y = keras.layers.Dense(20, "relu")(y)
    y = keras.layers.Dropout(dropout)(y)
    model = keras.Model(inputs, keras.layers.Dense(10, "softmax")(y))
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    return model


# What the guide of Keras does with DataParallel.


def test_devices_are_listed():
    assert keras.distribution.list_devices() == NAMES
    assert keras.distribution.list_devices(KIND.upper()) == NAMES
    cpus = keras.distribution.list_devices("cpu")
    assert cpus[0] == "cpu:0"


@pytest.mark.skipif(
    not hasattr(keras.distribution, "get_device_count"),
    reason="Keras 3.10 counts no devices",
)
def test_devices_are_counted():
    assert keras.distribution.get_device_count() == len(NAMES)
    cpus = keras.distribution.list_devices("cpu")
    assert keras.distribution.get_device_count("cpu") == len(cpus)
    assert keras.distribution.get_device_count("tpu") == 0


def test_one_process_needs_no_initialization(monkeypatch):
    keras.distribution.initialize()
    keras.distribution.initialize("10.0.0.1:1234", 1, 0)
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "1")
    keras.distribution.initialize()


def test_meshes_and_layouts_are_described():
    mesh = keras.distribution.DeviceMesh((len(NAMES), 1), ["data", "model"])
    assert mesh.devices.flatten().tolist() == NAMES
    layout = keras.distribution.TensorLayout(("model", "data"), mesh)
    assert layout.device_mesh is mesh


MADE_BY = {
    "default": lambda: keras.distribution.DataParallel(),
    "devices": lambda: keras.distribution.DataParallel(
        devices=keras.distribution.list_devices()
    ),
    "mesh": lambda: keras.distribution.DataParallel(
        device_mesh=keras.distribution.DeviceMesh(
            (len(NAMES),), ["data"], NAMES
        )
    ),
    "mesh with a model axis of size 1": lambda: keras.distribution.DataParallel(
        keras.distribution.DeviceMesh((len(NAMES), 1), ["data", "model"])
    ),
    "without sharding of data": lambda: keras.distribution.DataParallel(
        auto_shard_dataset=False
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", MADE_BY)
def test_a_model_trains_on_all_devices_as_on_one(how):
    x, y = digits()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    one = classifier()
    one_logs = one.fit(dataset, epochs=3, verbose=0)
    one_result = one.evaluate(dataset, verbose=0)

    distribution = MADE_BY[how]()
    keras.distribution.set_distribution(distribution)
    assert keras.distribution.distribution() is distribution
    many = classifier()
    many_logs = many.fit(dataset, epochs=3, verbose=0)
    many_result = many.evaluate(dataset, verbose=0)

    assert devices_of(many) == DEVICES
    assert_same_training(one, many, one_logs, many_logs)
    np.testing.assert_allclose(many_result, one_result, rtol=1e-5)
    kc.assert_in_sync(many)


@pytest.mark.long
def test_a_model_with_dropout_trains():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = classifier(dropout=0.4)
    model.summary(print_fn=lambda text, **_: None)
    before, _ = model.evaluate(*digits(), verbose=0)
    model.fit(*digits(), **FIT | {"epochs": 10})
    after, _ = model.evaluate(*digits(), verbose=0)
    assert after < before - 0.1
    kc.assert_in_sync(model)


# What is replicated, and for how long.


def test_the_strategy_is_that_of_replicate(count):
    keras.distribution.set_distribution(data_parallel(count))
    assert dense().distribute_strategy is kc.replicate(devices=count)


def test_what_is_made_under_a_distribution_has_copies():
    with data_parallel().scope():
        model = dense()
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    assert devices_of(model) == DEVICES[:MANY]
    strategy = kc.replicate(devices=MANY)
    for each in (variable, optimizer.iterations):
        assert keras_variables.backing(each).distribute_strategy is strategy


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("built", [True, False])
def test_a_model_stays_on_its_devices_after_the_scope(built):
    x, y = regression()
    one = dense()
    one_logs = one.fit(x, y, **FIT)

    with data_parallel().scope():
        keras.utils.set_random_seed(1)
        inputs = [keras.Input((8,))] if built else []
        many = keras.Sequential(
            [*inputs, keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
        )
    many.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    many_logs = many.fit(x, y, **FIT)

    assert devices_of(many) == DEVICES[:MANY]
    assert_same_training(one, many, one_logs, many_logs)
    kc.unreplicate(many)
    many.fit(x, y, **FIT)
    assert devices_of(many) == ()


@pytest.mark.long
@pytest.mark.parametrize("trained", [True, False])
def test_a_model_made_before_is_replicated_when_it_runs(trained):
    x, y = regression()
    one, many = dense(), dense()
    if trained:
        one.fit(x, y, **FIT)
        many.fit(x, y, **FIT)
    one_logs = one.fit(x, y, **FIT)
    with data_parallel().scope():
        many_logs = many.fit(x, y, **FIT)
    assert devices_of(one) == ()
    assert devices_of(many) == DEVICES[:MANY]
    assert_same_training(one, many, one_logs, many_logs)


@pytest.mark.parametrize("verb", ["compile", "evaluate", "predict"])
def test_every_verb_replicates(verb):
    x, y = regression()
    model = dense()
    expected = model.predict(x, verbose=0)
    with data_parallel().scope():
        if verb == "compile":
            model.compile("sgd", "mse")
        elif verb == "evaluate":
            model.evaluate(x, y, verbose=0)
        else:
            got = model.predict(x, verbose=0)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert devices_of(model) == DEVICES[:MANY]


def test_without_a_distribution_models_are_on_one_device():
    keras.distribution.set_distribution(data_parallel())
    keras.distribution.set_distribution(None)
    assert keras.distribution.distribution() is None
    model = dense()
    model.fit(*regression(), **FIT)
    assert devices_of(model) == ()
    assert isinstance(keras_variables.backing(model.weights[0]), tf.Variable)
    assert distribution_strategy() is None


@several
def test_scopes_nest_and_are_left_by_errors_too():
    outer, inner = data_parallel(2), data_parallel(1)
    with outer.scope():
        with inner.scope():
            assert dense().distribute_strategy.devices == DEVICES[:1]
        with pytest.raises(KeyError), inner.scope():
            raise KeyError
        assert keras.distribution.distribution() is outer
        assert dense().distribute_strategy.devices == DEVICES[:2]
    assert keras.distribution.distribution() is None


@several
def test_a_model_keeps_the_devices_that_it_has():
    x, y = regression()
    given = kc.replicate(dense(), [DEVICES[1]])
    with data_parallel(1).scope():
        made = dense()
    with data_parallel(2).scope():
        for model in (given, made):
            model.fit(x, y, **FIT)
    assert devices_of(given) == DEVICES[1:2]
    assert devices_of(made) == DEVICES[:1]


def test_a_stock_strategy_that_is_open_comes_first():
    stock = tf.distribute.OneDeviceStrategy(DEVICES[0])
    with data_parallel().scope(), stock.scope():
        assert dense().distribute_strategy is stock


def test_another_thread_has_a_distribution_of_its_own():
    found = []
    keras.distribution.set_distribution(data_parallel())
    thread = threading.Thread(target=lambda: found.append(devices_of(dense())))
    thread.start()
    thread.join()
    assert found == [()]


@says_so
def test_clearing_the_session_forgets_the_distribution():
    x, y = regression()
    keras.distribution.set_distribution(data_parallel())
    model = dense()
    keras.utils.clear_session()
    assert keras.distribution.distribution() is None
    with pytest.warns(kc.ConfluxWarning, match="has ended"):
        model.fit(x, y, **FIT)
    assert devices_of(model) == DEVICES[:MANY]
    assert devices_of(dense()) == ()


# What else models do.


def normalized() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile("rmsprop", "mse", metrics=["mae"], jit_compile=False)
    return model


@pytest.mark.long
def test_synchronized_normalization_on_all_kinds_of_data():
    x, y = regression(64)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            rows = slice(16 * index, 16 * (index + 1))
            return x[rows], y[rows]

    one = normalized()
    with data_parallel().scope():
        many = normalized()
    for _ in range(2):
        one.fit(x, y, validation_split=0.25, **FIT)
        many.fit(x, y, validation_split=0.25, **FIT)
    for model in (one, many):
        model.fit(Batches(), shuffle=False, verbose=0)
        model.train_on_batch(x[:7], y[:7])
    assert_same_training(one, many)


@pytest.mark.long
def test_saving_and_loading(tmp_path):
    x, y = regression()
    with data_parallel().scope():
        many = normalized()
        many.fit(x, y, **FIT)
        many.save(tmp_path / "many.keras")
        loaded = keras.models.load_model(tmp_path / "many.keras")
        assert devices_of(loaded) == DEVICES[:MANY]
        cloned = keras.models.clone_model(many)
        assert devices_of(cloned) == DEVICES[:MANY]
    one = keras.models.load_model(tmp_path / "many.keras")
    assert devices_of(one) == ()
    logs = [each.fit(x, y, **FIT) for each in (one, many, loaded)]
    assert_same_training(one, many, logs[0], logs[1])
    assert_same_training(one, loaded, logs[0], logs[2])


def test_a_model_that_shares_layers_follows_them():
    with data_parallel().scope():
        model = dense()
    head = keras.Sequential([model.layers[0], keras.layers.Dense(1)])
    head.compile("sgd", "mse", jit_compile=False)
    head.fit(*regression(), **FIT)
    assert devices_of(head) == DEVICES[:MANY]
    kc.assert_in_sync(model)


@pytest.mark.long
def test_two_models_and_a_train_step_of_ones_own():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = dense(), dense()

        def call(self, x):
            return self.first(x) + self.second(x)

    x, y = regression()
    one = Pair()
    one.compile("adam", "mse", jit_compile=False)
    one_logs = one.fit(x, y, **FIT)
    with data_parallel().scope():
        many = Pair()
        many.compile("adam", "mse", jit_compile=False)
        many_logs = many.fit(x, y, **FIT)
    assert_same_training(one, many, one_logs, many_logs)


def test_a_loop_of_ones_own():
    x, y = regression(60)
    one = dense("sgd")
    one.fit(x, y, **FIT | {"epochs": 1})

    with data_parallel().scope():
        many = dense(None)
        optimizer = keras.optimizers.SGD()
        loss_of = keras.losses.MeanSquaredError()

        @kc.withdevices
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, many(x, training=True))
            gradients = tape.gradient(loss, many.trainable_variables)
            weight = tf.shape(x)[0]
            gradients = kc.allreduce("mean", gradients, weight=weight)
            optimizer.apply(gradients, many.trainable_variables)

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        for parts in kc.distribute(dataset):
            assert parts[0].devices == DEVICES[:MANY]
            step(*parts)
    for expected, got in zip(one.weights, many.weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    kc.assert_in_sync(many)


def test_an_optimizer_for_several_devices_needs_such_a_model():
    model = dense(None)
    with data_parallel().scope():
        optimizer = keras.optimizers.SGD(momentum=0.9)
    with pytest.raises(kc.StrategyError, match="kernel, which"):
        optimizer.build(model.trainable_variables)
    kc.replicate(model, MANY)
    optimizer.build(model.trainable_variables)


@several
def test_it_names_the_devices_of_loops_while_it_is_set():
    kc.replicate(dense(), 1)
    batch = np.zeros((8, 2))
    with data_parallel(2).scope():
        dense().predict(batch.repeat(4, 1), verbose=0)
        assert kc.split(batch).devices == DEVICES[:2]
        assert kc.replicate(batch).devices == DEVICES[:2]
        assert kc.withdevices(lambda: 0)().devices == DEVICES[:2]
        with kc.replicate(devices=1):
            assert kc.split(batch).devices == DEVICES[:1]
        assert kc.split(batch, 1).devices == DEVICES[:1]


@several
def test_running_a_model_leaves_no_trace_on_later_loops():
    model = dense()
    with data_parallel(1).scope():
        model.fit(*regression(), **FIT)
    assert kc.split(np.zeros((8, 2))).devices == DEVICES


# Tensors and data.


@pytest.mark.parametrize("axes", [(None, None), ("batch", None)])
def test_a_tensor_that_a_program_sees_so_already_is_returned(axes):
    layout = keras.distribution.TensorLayout(axes, data_parallel().device_mesh)
    tensor = tf.ones((8, 2))
    assert keras.distribution.distribute_tensor(tensor, layout) is tensor
    symbolic = keras.Input((2,))
    assert keras.distribution.distribute_tensor(symbolic, layout) is symbolic


def test_a_layer_may_lay_out_what_it_computes():
    class LaidOut(keras.layers.Layer):
        def call(self, x):
            mesh = keras.distribution.DeviceMesh((len(NAMES),), ["data"])
            layout = keras.distribution.TensorLayout(("data", None), mesh)
            return keras.distribution.distribute_tensor(x * 2, layout)

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([LaidOut()])
    x = np.arange(22, dtype="float32").reshape(11, 2)
    np.testing.assert_array_equal(model.predict(x, verbose=0), x * 2)


@several
def test_a_layout_that_splits_another_axis_is_refused():
    mesh = data_parallel().device_mesh
    layout = keras.distribution.TensorLayout((None, "batch"), mesh)
    with pytest.raises(NotImplementedError, match="splits axis 1"):
        keras.distribution.distribute_tensor(tf.ones((2, 8)), layout)
    mesh = keras.distribution.DeviceMesh((1, 2), ["data", "model"], NAMES[:2])
    layout = keras.distribution.TensorLayout(("model", None), mesh)
    with pytest.raises(NotImplementedError, match="over 'model'"):
        keras.distribution.distribute_tensor(tf.ones((2, 8)), layout)
    without_mesh = keras.distribution.TensorLayout(("batch",))
    with pytest.raises(ValueError, match="needs a mesh"):
        keras.distribution.distribute_tensor(tf.ones(8), without_mesh)


def test_one_process_reads_all_data():
    distribution = data_parallel()
    dataset = tf.data.Dataset.range(8).batch(4)
    # Keras has none from 3.16 on.
    distribute = getattr(distribution, "distribute_dataset", lambda data: data)
    assert distribute(dataset) is dataset
    assert distribution.get_data_layout((8, 2)).axes == ("batch", None)


# What is refused.


@several
def test_a_mesh_of_more_than_data_parallelism_is_refused():
    mesh = keras.distribution.DeviceMesh((1, 2), ["data", "model"], NAMES[:2])
    with pytest.raises(NotImplementedError, match="others must be of size 1"):
        keras.distribution.DataParallel(device_mesh=mesh)


class Unknown(keras.distribution.DataParallel.__base__):
    """A distribution of the user's own."""


def test_an_unknown_one_is_refused_in_a_scope_and_behind_ones_back():
    unknown = Unknown(keras.distribution.DeviceMesh((len(NAMES),), ["model"]))
    with pytest.raises(NotImplementedError), unknown.scope():
        pytest.fail("entered")
    assert keras.distribution.distribution() is None
    # As a `set_distribution` does that was imported before this package.
    keras.distribution.set_distribution.__wrapped__(unknown)
    with pytest.raises(NotImplementedError, match="Supported is"):
        dense()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([NAMES[0], NAMES[0]], "may be named once"),
        (["cpu:0", "gpu:0"], "one kind"),
        ([f"{KIND}:0", f"{KIND}:97"], "no device|98"),
        (["tpu:0"], "not a device"),
    ],
)
def test_wrong_devices_are_named(names, message):
    distribution = keras.distribution.DataParallel(devices=names)
    with pytest.raises(kc.DeviceError, match=message):
        keras.distribution.set_distribution(distribution)
    assert keras.distribution.distribution() is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_processes": 2},
        {"process_id": 1},
        {"job_addresses": "10.0.0.1:1234,10.0.0.2:1234"},
    ],
)
def test_processes_that_are_half_told_are_refused(arguments):
    with pytest.raises(kc.ClusterError, match="KERAS_DISTRIBUTION"):
        keras.distribution.initialize(**arguments)


def test_processes_that_the_environment_half_tells_are_refused(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "4")
    with pytest.raises(kc.ClusterError, match="KERAS_DISTRIBUTION_JOB"):
        keras.distribution.initialize()
    with pytest.raises(kc.ClusterError, match="KERAS_DISTRIBUTION_JOB"):
        kc.ReplicatedStrategy()


@pytest.mark.parametrize(
    "call",
    [kc.initialize, keras.distribution.initialize, kc.ReplicatedStrategy],
)
def test_processes_cannot_be_joined_once_tensorflow_has_started(
    call, monkeypatch
):
    names = {
        "JOB_ADDRESSES": "localhost:1234,localhost:1235",
        "NUM_PROCESSES": "2",
        "PROCESS_ID": "1",
    }
    for name, value in names.items():
        monkeypatch.setenv(f"KERAS_DISTRIBUTION_{name}", value)
    with pytest.raises(kc.ProcessError, match="at the start of the program"):
        call()


@pytest.mark.parametrize(
    ("call", "source"),
    [
        (
            lambda: keras.distribution.initialize("a:1,b:1", 2, 1),
            "KERAS_DISTRIBUTION_JOB_ADDRESSES",
        ),
        (lambda: kc.initialize("a:1,b:1", 1), "the arguments of initialize"),
    ],
)
def test_processes_are_joined_and_one_line_says_so(
    call, source, monkeypatch, caplog
):
    joined = []
    monkeypatch.setattr(
        processes, "_connect", lambda *told: joined.append(told)
    )
    monkeypatch.setattr(tensorflow_internals, "has_started", lambda: False)
    caplog.set_level(logging.INFO, "keras_conflux")
    call()
    assert [told[0] for told in joined] == [Cluster(("a:1", "b:1"), 1, source)]
    assert caplog.messages == [f"Process 1 of 2, at b:1, as {source} says."]


def test_one_process_is_alone():
    kc.initialize()
    keras.distribution.initialize(num_processes=1, process_id=0)
    assert (kc.process_index(), kc.process_count()) == (0, 1)
    kc.barrier()


@pytest.mark.skipif(ON_GPU, reason="speaks of CPU devices")
def test_spellings_of_devices():
    for names in (["CPU:0"], ["/device:CPU:0"], [0]):
        with keras.distribution.DataParallel(devices=names).scope():
            assert dense().distribute_strategy.devices == ("CPU:0",)


@says_so
def test_a_cleared_session_ends_a_distribution_and_says_so():
    keras.distribution.set_distribution(data_parallel())
    assert devices_of(dense()) == DEVICES[:MANY]
    keras.utils.clear_session()
    with pytest.warns(kc.ConfluxWarning, match="has ended <DataParallel"):
        assert devices_of(dense()) == ()
    dense()  # once is enough
    keras.distribution.set_distribution(data_parallel())
    keras.distribution.set_distribution(None)
    dense()
    with data_parallel().scope():
        keras.utils.clear_session()
        keras.distribution.set_distribution(data_parallel())
        assert devices_of(dense()) == DEVICES[:MANY]
    dense()
