"""What statistics say, and that NaN is found and named."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from models import dense

import keras_conflux as kc

NAN, INF = float("nan"), float("inf")


def test_statistics_are_those_of_numpy():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    (found,) = kc.statistics({"kernel": [x, None]})
    assert found.path == "['kernel'][0]"
    assert found.leaf == "float32(3, 4)"
    assert found.mean == pytest.approx(x.mean())
    assert found.std == pytest.approx(x.std())
    assert (found.min, found.max) == (x.min(), x.max())
    assert (found.nans, found.infs) == (0, 0)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (
            np.array([1.0, NAN, 3.0, -INF]),
            "the value: float64(4), mean 2, std 1, min 1, max 3, "
            "1 NaN, 1 infinite",
        ),
        (
            np.zeros((0, 2), "float16"),
            "the value: float16(0, 2), mean nan, std nan, min nan, max nan, "
            "0 NaN, 0 infinite",
        ),
        (
            tf.constant([1, 2], tf.bfloat16),
            "the value: bfloat16(2), mean 1.5, std 0.5, min 1, max 2, "
            "0 NaN, 0 infinite",
        ),
        (
            tf.IndexedSlices(tf.constant([[2.0], [4.0]]), tf.constant([0, 5])),
            "the value: float32(2, 1), mean 3, std 1, min 2, "
            "max 4, 0 NaN, 0 infinite",
        ),
        (
            np.array([True, False]),
            "the value: bool(2), mean 0.5, std 0.5, min 0, max 1, "
            "0 NaN, 0 infinite",
        ),
    ],
    ids=["not finite", "empty", "bfloat16", "sparse", "bool"],
)
def test_statistics_in_a_line(leaf, expected):
    (found,) = kc.statistics(leaf)
    assert str(found) == expected


def test_statistics_of_models_and_replicas(count):
    model = kc.replicate(dense("adam"), count)
    model.optimizer.build(model.trainable_variables)
    by_path = {found.path: found for found in kc.statistics(model)}
    kernel = model.layers[0].kernel
    assert by_path[kernel.path].max == kernel.numpy().max()
    assert any("momentum" in path for path in by_path)
    assert [s.path for s in kc.statistics([kernel])] == [kernel.path]

    mean = kc.replicate(keras.metrics.Mean, count)
    kc.withdevices(lambda: mean.update_state(2.0), devices=count)()
    assert max(s.max for s in kc.statistics(mean)) == 2.0 * count

    values = kc.Replicas([{"x": float(i)} for i in range(count)], count)
    found = kc.statistics(values)
    assert found.devices == values.devices
    assert [each[0].mean for each in found] == list(range(count))


def test_what_statistics_refuse():
    with pytest.raises(TypeError, match=r"\['name'\] is string"):
        kc.statistics({"name": np.array(["a"])})
    with pytest.raises(TypeError, match=r"\[1\] is a object"):
        kc.statistics([1.0, object()])
    with pytest.raises(ValueError, match="Return the tensors of interest"):
        kc.withdevices(lambda: kc.statistics(tf.ones(2)), devices=MANY)()


def test_finite_things_pass(count):
    model = kc.replicate(dense("adam"), count)
    model.optimizer.build(model.trainable_variables)
    kc.assert_finite(model)
    kc.assert_finite(model.optimizer)
    kc.assert_finite([None, 1, "name", np.ones(3), tf.constant([True])])
    kc.assert_finite(kc.Replicas([1.0] * count, count))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"a": np.ones(2), "b": [np.array([1, NAN, INF, NAN])]},
            r"^\['b'\]\[0\] is not finite: of 4 numbers 2 are NaN and 1 inf",
        ),
        (np.float16(INF), "^the value is not finite: of 1 numbers 0"),
        (tf.sparse.from_dense([[0.0, NAN]]), "of 1 numbers 1 are NaN"),
        (tf.ragged.constant([[1.0], [NAN, 2.0]]), "of 3 numbers 1 are NaN"),
        (tf.Variable(NAN, name="scale"), "^scale:0 is not finite"),
    ],
    ids=["tree", "number", "sparse", "ragged", "variable"],
)
def test_the_first_leaf_that_is_not_finite_is_named(target, message):
    with pytest.raises(FloatingPointError, match=message):
        kc.assert_finite(target)


@several
def test_the_replica_that_is_not_finite_is_named():
    gradients = kc.Replicas([{"w": 0.0}] * (MANY - 1) + [{"w": NAN}], MANY)
    message = rf"\['w'\] on replica {MANY - 1} is not finite"
    with pytest.raises(FloatingPointError, match=message):
        kc.assert_finite(gradients)

    model = kc.replicate(dense(), MANY)
    kernel = model.layers[1].kernel

    @kc.withdevices(devices=MANY)
    def spoil():
        if kc.replica().index == 1:
            kernel.assign(kernel * NAN)

    spoil()
    message = f"{kernel.path} on replica 1 is not finite: of 16 numbers 16"
    for target in (model, [kernel], kernel):
        with pytest.raises(FloatingPointError, match=message):
            kc.assert_finite(target)


def test_inside_a_step_the_step_raises(count):
    model = kc.replicate(dense(), count)

    @kc.withdevices(devices=count)
    def step(x):
        gradients = kc.allreduce("sum", {"w": x})
        kc.assert_finite(gradients)
        kc.assert_finite(model)
        return gradients["w"]

    fine = [1.0] * count
    assert float(step(kc.Replicas(fine, count))[0]) == count
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"\['w'\] on replica \d is not"
    ):
        step(kc.Replicas([*fine[1:], NAN], count))
    assert float(step(kc.Replicas(fine, count))[0]) == count


@pytest.mark.skipif(ON_GPU, reason="a variable of one replica alone")
def test_inside_a_step_each_replica_looks_at_its_own_copy():
    model = kc.replicate(dense(), MANY)
    bias = model.layers[1].bias

    @kc.withdevices(devices=MANY)
    def spoil():
        if kc.replica().index == MANY - 1:
            bias.assign(bias + INF)

    spoil()
    step = kc.withdevices(lambda: kc.assert_finite(model), devices=MANY)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"{bias.path} on replica {MANY - 1} is not finite",
    ):
        step()
