"""Trees on their way between devices."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import several
from models import dense

import keras_conflux as kc

LAST = DEVICES[-1]
HOST = kc.Device("CPU:0")


def on(device, value):
    with tf.device(device):
        return tf.identity(value)


@pytest.mark.parametrize(
    "leaf",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(3, dtype="int32"),
        np.arange(3, dtype="int64"),
        np.array([True, False]),
        np.array([1.5], ml_dtypes.bfloat16),
        np.array([1j]),
        np.zeros((0, 2), "float16"),
        np.float32(2),
        7,
        2.5,
        True,
        on(HOST, tf.range(3.0)),
        on(DEVICES[0], tf.range(3.0)),
        on(LAST, tf.range(3)),
    ],
    ids=lambda leaf: f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}",
)
@pytest.mark.parametrize("device", sorted({HOST, DEVICES[0], LAST}))
def test_numbers_move_and_keep_their_dtype(leaf, device):
    moved = kc.to_device(leaf, device)
    assert isinstance(moved, tf.Tensor)
    assert kc.device_of(moved) == device
    assert moved.dtype == tf.convert_to_tensor(leaf).dtype
    np.testing.assert_array_equal(moved, leaf)
    assert kc.to_device(moved, device) is moved
    back = kc.to_cpu(moved)
    assert isinstance(back, np.ndarray | np.generic)
    np.testing.assert_array_equal(back, leaf)


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        "text",
        b"bytes",
        np.array(["a", "b"]),
        np.array(["a", 1], object),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        print,
        tf.constant(["a"]),
        tf.ragged.constant([["a"], []]),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_number_passes_through(leaf):
    assert kc.to_device(leaf, LAST) is leaf
    assert kc.device_of(leaf) is None
    if not isinstance(leaf, tf.Tensor | tf.RaggedTensor):
        assert kc.to_cpu(leaf) is leaf


def test_what_is_on_the_host_stays_the_same_object():
    tree = [np.ones(2), np.float32(3), 7, 2.5, True]
    for there, leaf in zip(kc.to_cpu(tree), tree, strict=True):
        assert there is leaf


def test_a_tensor_of_strings_is_bytes_on_the_host():
    assert kc.to_cpu(tf.constant(["a", "b"])).tolist() == [b"a", b"b"]


@pytest.mark.parametrize(
    ("composite", "dense"),
    [
        (tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.RaggedTensor.to_tensor),
        (tf.sparse.from_dense([[1.0, 0.0]]), tf.sparse.to_dense),
        (
            tf.IndexedSlices(tf.ones((1, 2)), tf.constant([3])),
            lambda slices: slices.values,
        ),
        (
            tf.IndexedSlices(
                tf.ones((1, 2)), tf.constant([3]), tf.constant([5, 2])
            ),
            lambda slices: slices.values,
        ),
    ],
    ids=["ragged", "sparse", "slices", "slices of a shape"],
)
def test_composite_tensors_move_in_parts(composite, dense):
    moved = kc.to_device({"a": composite}, LAST)["a"]
    assert type(moved) is type(composite)
    assert kc.device_of(moved) == LAST
    for part in tf.nest.flatten(moved, expand_composites=True):
        assert kc.device_of(part) == LAST
    assert kc.to_device(moved, LAST) is moved
    back = kc.to_cpu(moved)
    assert type(back) is type(composite)
    assert kc.device_of(back) == HOST
    np.testing.assert_array_equal(dense(back), dense(composite))


def test_a_tree_keeps_its_structure_and_what_it_shares():
    array, tensor = np.ones(2), on(HOST, tf.ones(3))
    tree = {"a": [array, (tensor, None)], "b": (array, tensor), "name": "x"}
    moved = kc.to_device(tree, LAST)
    keras.tree.assert_same_structure(tree, moved)
    assert moved["a"][0] is moved["b"][0]
    assert moved["a"][1][0] is moved["b"][1]
    assert moved["name"] == "x"
    back = kc.to_cpu(moved)
    assert back["a"][0] is back["b"][0]
    np.testing.assert_array_equal(back["b"][1], tensor)


def test_around_all_devices_and_back():
    values = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    here = values
    for device in [*DEVICES, *reversed(DEVICES), HOST, *DEVICES]:
        here = kc.to_device(here, device)
        assert here.backing_device.endswith(device)
    np.testing.assert_array_equal(here, values)


def test_a_moved_array_is_a_copy():
    array = np.zeros(1000, "float32")
    moved, back = kc.to_device(array, HOST), kc.to_cpu(tf.constant(array))
    array += 1
    back += 2
    assert not moved.numpy().any()


@several
def test_gradients_flow_back():
    x = on(DEVICES[0], [1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(kc.to_device(x, LAST) ** 2)
    gradient = tape.gradient(y, x)
    np.testing.assert_array_equal(gradient, [2, 4])


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_variables_give_their_values_and_stay(make):
    variable = make([1.0, 2.0])
    before = kc.device_of(variable)
    moved = kc.to_device({"v": variable}, LAST)["v"]
    assert isinstance(moved, tf.Tensor)
    assert kc.device_of(moved) == LAST
    assert kc.device_of(variable) == before
    value = kc.to_cpu(variable)
    variable.assign([5.0, 6.0])
    np.testing.assert_array_equal(moved, [1, 2])
    np.testing.assert_array_equal(value, [1, 2])


def test_replicated_variables_give_one_value():
    model = kc.replicate(dense(), MANY)
    weights = model.get_weights()
    for device in DEVICES:
        moved = kc.to_device(model.weights, device)
        assert kc.device_of(moved) == device
        for one, other in zip(moved, weights, strict=True):
            np.testing.assert_array_equal(one, other)
    if MANY > 1:
        with pytest.raises(kc.DeviceError, match=r"\[0\]\[0\] is on"):
            kc.device_of(model.weights)


def test_replicas_become_a_list():
    x, y = kc.split((np.arange(5.0), np.arange(5)), MANY)
    moved = kc.to_device({"x": x, "y": (y, 1)}, LAST)
    assert kc.device_of(moved) == LAST
    assert len(moved["x"]) == MANY
    np.testing.assert_array_equal(tf.concat(moved["x"], 0), np.arange(5.0))
    host = kc.to_cpu(x)
    assert isinstance(host, list)
    np.testing.assert_array_equal(np.concatenate(host), np.arange(5.0))
    distributed = x.to_distributed()
    np.testing.assert_array_equal(
        np.concatenate(kc.to_cpu(distributed)), np.arange(5.0)
    )


def test_what_a_step_returns_is_on_its_device():
    @kc.withdevices(devices=MANY)
    def step(x):
        return {"sum": tf.reduce_sum(x), "rows": tf.shape(x)[0], "all": x > 0}

    outputs = step(kc.split(np.ones(8, "float32"), MANY))
    for output, device in zip(outputs, DEVICES, strict=False):
        assert kc.device_of(output) == device
        assert kc.device_of(output["sum"]) == device


@several
def test_leaves_that_disagree_are_named():
    tree = {"a": [on(DEVICES[0], 1.0), 2.0], "b": on(LAST, 1.0)}
    message = rf"\['a'\]\[0\] is on {DEVICES[0]}, \['b'\] is on {LAST}"
    with pytest.raises(kc.DeviceError, match=message):
        kc.device_of(tree)


def test_a_tree_without_tensors_is_nowhere():
    assert kc.device_of({"a": [1, np.ones(2), None, "x"]}) is None
    assert kc.device_of([]) is None


@pytest.mark.parametrize(
    "call", [lambda x: kc.to_device(x, LAST), kc.to_cpu, kc.device_of]
)
def test_what_holds_variables_is_refused(call):
    for stateful in (dense(), keras.optimizers.SGD(), keras.metrics.Mean()):
        with pytest.raises(TypeError, match=r"\['m'\] is a .*model.weights"):
            call({"m": stateful})
    with pytest.raises(TypeError, match="prefetch"):
        call(tf.data.Dataset.range(3))
    with pytest.raises(RuntimeError, match="traces a graph"):
        tf.function(call)(tf.ones(2))


@pytest.mark.parametrize("device", ["TPU:0", 98, "gpu", "GPU:98"])
def test_there_is_no_such_device(device):
    with pytest.raises(kc.DeviceError):
        kc.to_device(np.ones(2), device)
