"""What `replicate` makes of each kind of target, and what it refuses."""

import copy
import pickle
import threading

import forked
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
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._replication import state


def test_nothing_gives_a_strategy(count):
    strategy = kc.replicate(devices=count)
    assert isinstance(strategy, kc.ReplicatedStrategy)
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.devices == DEVICES[:count]
    assert strategy.num_replicas_in_sync == count
    assert kc.replicate(devices=count) is strategy
    with strategy as entered:
        assert entered is strategy
        assert tf.distribute.get_strategy() is strategy
    assert tf.distribute.get_strategy() is not strategy
    assert (
        repr(strategy) == f"ReplicatedStrategy([{', '.join(strategy.devices)}])"
    )


def test_values_get_a_copy_on_each_device(count):
    tree = {"a": np.arange(3.0), "b": [None, tf.ones(2)], "name": "x", "n": 2}
    replicas = kc.replicate(tree, count)
    assert len(replicas) == count
    assert replicas.devices == DEVICES[:count]
    for index, here in enumerate(replicas):
        assert replicas[index] is here
        assert replicas[DEVICES[index]] is here
        np.testing.assert_array_equal(here["a"], tree["a"])
        assert here["a"].device.endswith(DEVICES[index])
        assert here["a"].dtype == tf.float64
        assert here["b"][0] is None
        assert here["name"] == "x"
    assert repr(kc.replicate(np.ones((2, 3)), 1)).startswith(
        "Replicas of float64(2, 3) on "
    )


@pytest.mark.parametrize("owner", [keras.layers.Layer, keras.metrics.Metric])
def test_what_is_behind_a_variable_can_be_converted(owner, count):
    each = owner()
    add = getattr(each, "add_variable", None) or each.add_weight
    number, nothing = add((), "ones", name="a"), add((), "zeros", name="b")
    each.built = True
    kc.replicate(each, count)
    for convert in (float, int, complex, bool):
        assert convert(number.value) == convert(1.0)
        assert convert(nothing.value) == convert(0.0)
    assert np.asarray(number.value).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(number.value), 1.0)


def test_a_variable_becomes_one_a_device():
    original = keras.Variable([1.0, 2.0])
    replicas = kc.replicate(original, MANY)
    replicas[0].assign([5.0, 5.0])
    np.testing.assert_array_equal(original.numpy(), [1, 2])
    if MANY > 1:
        np.testing.assert_array_equal(replicas[1].numpy(), [1, 2])


def test_a_callable_is_called_in_the_scope():
    strategy = kc.replicate(devices=MANY)
    model = kc.replicate(dense, MANY)
    assert model.distribute_strategy is strategy
    kc.assert_in_sync(model)


def test_replicating_twice_changes_nothing():
    model = kc.replicate(dense(), MANY)
    value = model.weights[0].value
    assert kc.replicate(model) is model
    assert kc.replicate(model, MANY) is model
    assert model.weights[0].value is value


def test_tied_weights_stay_tied():
    shared = keras.layers.Dense(8)
    model = keras.Sequential([keras.layers.Input((8,)), shared, shared])
    kc.replicate(model, MANY)
    assert len(model.weights) == 2
    kc.allreduce("sum", model)


def test_conversion_to_and_from_tensorflow():
    replicas = kc.replicate(np.float32(3), MANY)
    value = replicas.to_distributed()
    strategy = kc.replicate(devices=MANY)
    assert len(strategy.experimental_local_results(value)) == MANY
    back = kc.Replicas.from_distributed(value)
    assert [float(v) for v in back] == [3.0] * MANY
    doubled = kc.withdevices(lambda x: x * 2, devices=MANY)(value)
    assert [float(v) for v in doubled] == [6.0] * MANY


def test_a_model_of_other_devices_is_refused():
    if MANY < 2:
        pytest.skip("needs two devices")
    model = kc.replicate(dense(), MANY)
    with pytest.raises(kc.StrategyError, match="unreplicate"):
        kc.replicate(model, 1)
    kc.unreplicate(model)
    kc.replicate(model, 1)


def test_a_model_of_a_stock_strategy_is_refused():
    with tf.distribute.OneDeviceStrategy(DEVICES[0]).scope():
        model = dense()
    with pytest.raises(kc.StrategyError, match="OneDeviceStrategy"):
        kc.replicate(model)


def test_unreplicate_leaves_others_alone():
    model = dense()
    assert kc.unreplicate(model) is model


def test_one_value_a_device():
    with pytest.raises(ValueError, match="one value per device"):
        kc.Replicas([1, 2, 3], 1)


def test_a_device_that_has_nothing_is_named():
    if MANY < 2:
        pytest.skip("needs two devices")
    values = kc.Replicas([1], 1)
    with pytest.raises(kc.DeviceError, match=f"is on {DEVICES[1]}"):
        values[DEVICES[1]]


def test_two_strategies_in_one_process():
    if MANY < 2:
        pytest.skip("needs two devices")
    for devices in (MANY, 1, MANY, [DEVICES[-1], DEVICES[0]]):
        values = kc.replicate(np.float32(2), devices)
        for value in kc.allreduce("sum", values):
            assert float(value) == 2 * len(values)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([0, 0], "may be named once"),
        ([], "empty list"),
        (0, "at least 1"),
        (True, "bool"),
        (99, "99 .* devices (were asked for|are needed)"),
        ("TPU:0", "not a device"),
        ([0, 98], "no device|98|99"),
        ("GPU:99", "no device GPU:99. The devices are: .*CPU:0"),
        ("2", r"2 for the first 2 devices, or \[2\]"),
        (" 0 ", "may mean a count or an index"),
        ("auto", "'auto' is not a device. Write .*'all'"),
        (-1, "at least 1. Received: -1. Write .*'all'"),
        (1.5, "1.5 does not name devices. Write .* one object per call"),
        (np.True_, "bool"),
        (["CPU:0", "GPU:0"], "one kind"),
    ],
)
def test_wrong_devices_are_named(wanted, message):
    with pytest.raises(kc.DeviceError, match=message):
        kc.devices(wanted)


def test_spellings_of_devices():
    kind = "GPU" if ON_GPU else "CPU"
    assert kc.devices() == kc.devices("all") == DEVICES
    assert kc.devices(1) == kc.devices("0,") == kc.devices([0])
    assert kc.devices(np.int64(1)) == kc.devices([np.int8(0)]) == DEVICES[:1]
    assert kc.devices(np.arange(1)) == DEVICES[:1]
    assert kc.devices(f"/{kind.lower()}:0") == DEVICES[:1]
    assert kc.devices([f"/job:localhost/device:{kind}:0"]) == DEVICES[:1]
    if MANY > 1:
        assert kc.devices("1, 0") == (DEVICES[1], DEVICES[0])
    assert (DEVICES[0].kind, DEVICES[0].ordinal) == (kind, 0)


SHARE = """
import keras
import numpy as np
import keras_conflux as kc

with kc.replicate(devices=2) as strategy:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
head = keras.Sequential([model.layers[0], keras.layers.Dense(1)])
head.compile("sgd", "mse")
head.fit(np.ones((16, 8)), np.ones((16, 1)), verbose=0)
assert head.distribute_strategy is strategy
kc.assert_in_sync(model)
"""


@pytest.mark.long
def test_a_model_that_shares_layers_of_a_scope_follows_them():
    if MANY < 2:
        pytest.skip("needs two devices")
    # In a process where nothing has been promoted.
    result = forked.run("-c", SHARE)
    assert result.returncode == 0, result.stderr


def test_a_strategy_of_ones_own_is_that_of_its_devices():
    if MANY < 2:
        pytest.skip("needs two devices")
    strategy = kc.ReplicatedStrategy([DEVICES[1]])
    assert kc.ReplicatedStrategy([DEVICES[1]]) is not strategy
    model = dense()
    kc.replicate(model, [DEVICES[1]])
    assert model.distribute_strategy is kc.replicate(devices=[DEVICES[1]])


def test_models_of_a_tree_are_replicated_in_place():
    target = {"model": dense(), "optimizer": keras.optimizers.SGD(0.1)}
    assert kc.replicate(target, MANY).keys() == target.keys()
    for each in (target["model"].weights[0], target["optimizer"].iterations):
        assert len(state.copies(each)) == MANY


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 2, r"devices=2"),
        (lambda: "gpu", r"devices='gpu'"),
        (lambda: tf.data.Dataset.range(3), r"given to\s+`fit`"),
        (keras.losses.MeanSquaredError, "a loss has no variables"),
        (lambda: [dense(), np.ones(2)], "not both at once"),
    ],
)
def test_what_cannot_be_replicated(make, message):
    with pytest.raises(TypeError, match=message):
        kc.replicate(make(), MANY)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("leave", ["scope", "unreplicate"])
def test_a_scope_on_other_devices_than_before(leave):
    """As in a notebook, where one tries one device and then more."""
    x, y = regression(16)
    first = kc.replicate(dense(), 1)
    first.fit(x, y, verbose=0)
    with kc.replicate(devices=MANY):
        if leave == "unreplicate":
            kc.unreplicate(first)
        second = dense()
    for model in (second, first):
        model.fit(x, y, verbose=0)
    assert len(state.copies(second.weights[0])) == MANY
    assert len(state.copies(first.weights[0])) == 1


def test_a_scope_in_each_of_two_threads():
    strategy = kc.replicate(devices=MANY)
    first_is_in, second_is_in, first_is_out = (
        threading.Event() for _ in range(3)
    )
    found = []

    def first():
        with strategy:
            first_is_in.set()
            second_is_in.wait(30)
        found.append(tf.distribute.has_strategy())
        first_is_out.set()

    def second():
        first_is_in.wait(30)
        with strategy:
            second_is_in.set()
            first_is_out.wait(30)
            found.append(tf.distribute.get_strategy() is strategy)
        found.append(tf.distribute.has_strategy())

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False, True, False]


def test_data_that_is_misspelt_or_of_no_model_is_refused():
    model = dense()
    with pytest.raises(ValueError, match="data='lokal'"):
        kc.replicate(model, data="lokal")
    with pytest.raises(TypeError, match="has no meaning for: SGD"):
        kc.replicate(keras.optimizers.SGD(), data="local")
    with pytest.raises(TypeError, match="has no meaning for: NoneType"):
        kc.replicate(data="local")
    assert model.distribute_strategy is dense().distribute_strategy


@pytest.mark.long
def test_in_one_process_local_data_are_all_data():
    x, y = regression(21)
    plain, local = dense(), kc.replicate(dense(), data="local")
    for model in (plain, local):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert_same_training(plain, local)
    np.testing.assert_allclose(
        plain.predict(x, verbose=0), local.predict(x, verbose=0), rtol=1e-5
    )


def test_asking_for_the_index_adds_nothing_to_a_graph():
    added = []

    @tf.function
    def step():
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        index = replica_index()
        added.append((index, len(graph.get_operations()) - before))

    kc.replicate(devices=MANY).run(step)
    assert added == [(index, 0) for index in range(MANY)]


class OwnStep(keras.Sequential):
    """Trains by a `train_step` of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@several
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep])
@pytest.mark.parametrize("first", ["fit", "evaluate", "predict"])
def test_a_model_that_its_first_call_builds(kind, first):
    def trained(replicate):
        keras.utils.set_random_seed(0)
        model = kind([keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        replicate(model)
        x = np.arange(24, dtype="float32").reshape(8, 3)
        model(x[:1])
        if first == "evaluate":
            model.evaluate(x, x[:, :1], verbose=0)
        if first == "predict":
            model.predict(x, verbose=0)
        history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
        return model, history

    one, one_history = trained(lambda model: model)
    many, history = trained(lambda model: kc.replicate(model, 2))
    assert_same_training(one, many, one_history, history)


def test_names_stay_when_a_model_is_replicated():
    layer = keras.layers.Dense(2, name="dense")
    model = keras.Sequential([keras.Input((2,)), layer], name="model")
    before = [x.value.name for x in model.variables]
    assert before[0] == "model/dense/kernel:0"
    kc.replicate(model, kc.devices(MANY))
    assert [x.value.name for x in model.variables] == before
    kc.unreplicate(model)
    assert [x.value.name for x in model.variables] == before


@several
def test_replicas_show_their_numbers():
    where = ", ".join(DEVICES[:2])
    for values, shown in [
        ([tf.constant(0.5), tf.constant(0.25)], "0.5, 0.25"),
        ([np.float64(1e-9), 3], "1e-09, 3"),
        ([tf.constant(7), tf.constant(7)], "7"),
        ([tf.constant(2.0, tf.bfloat16), np.int8(1)], "2, 1"),
        ([tf.constant(True), "text"], "True, 'text'"),
        ([tf.ones(3), tf.ones(2)], "float32(3), float32(2)"),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 2}], "2 leaves"),
    ]:
        assert repr(kc.Replicas(values, 2)) == f"Replicas of {shown} on {where}"


def test_a_replicas_that_is_taken_for_a_number_says_what_to_write():
    losses = kc.Replicas([tf.constant(1.0)] * MANY, MANY)
    for use in (
        float,
        int,
        lambda x: f"{x:.3f}",
        lambda x: x.numpy(),
        lambda x: x.shape,
    ):
        with pytest.raises((TypeError, AttributeError), match=r"`losses\[0\]`"):
            use(losses)
    with pytest.raises(AttributeError, match=r"no 'numbers'\.$"):
        losses.numbers  # noqa: B018
    assert not hasattr(losses, "numpy")
    assert f"{losses}" == str(losses)
    assert pickle.loads(pickle.dumps(losses)).devices == losses.devices
    assert copy.deepcopy(losses).devices == losses.devices
    np.testing.assert_array_equal(np.asarray(list(losses)), np.ones(MANY))
