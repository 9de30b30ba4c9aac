"""What is compared when copies shall be equal."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from models import dense

import keras_conflux as kc
from keras_conflux._replication import state

NAN = float("nan")


@several
def test_trees_of_replicas_are_compared():
    same = kc.Replicas([{"w": tf.ones(2), "none": None}] * MANY, MANY)
    assert kc.in_sync(same)
    kc.assert_in_sync(same)
    other = [{"w": tf.ones(2)}] * (MANY - 1) + [{"w": tf.constant([1.0, 1.5])}]
    message = rf"\['w'\] differs between replica 0 and replica {MANY - 1}, "
    with pytest.raises(kc.ReplicaMismatchError, match=message + "by up to 0.5"):
        kc.assert_in_sync(kc.Replicas(other, MANY))
    for trees in ([1.0, NAN], [{"a": 1.0}, {"b": 1.0}], [1.0, None]):
        assert not kc.in_sync(kc.Replicas(trees, 2))
    assert kc.in_sync(kc.Replicas([NAN, NAN], 2))


def test_whatever_is_compared_is_looked_at():
    model = kc.replicate(dense(), MANY)
    variable = model.trainable_variables[0]
    copies = state.copies(variable)
    copies[-1].assign_add(tf.ones_like(copies[-1]))
    weights = model.trainable_variables, model.non_trainable_variables
    for target in (model, [model], weights, {"w": model.weights}, variable):
        assert kc.in_sync(target) == (MANY == 1)
    for call in (kc.in_sync, kc.assert_in_sync, kc.synchronize):
        message = f"`{call.__name__}` takes Keras models"
        for target in (5, "x", tf.ones(2), [tf.Variable(1.0)]):
            with pytest.raises(TypeError, match=message):
                call(target)
    kc.synchronize({"weights": weights})
    assert kc.in_sync(model)


@several
def test_mirrored_variables_of_tensorflow_are_compared():
    strategy = kc.replicate(devices=MANY)
    on_read = tf.VariableSynchronization.ON_READ
    with strategy.scope():
        mirrored = tf.Variable([1.0, 2.0], name="average")
        added = tf.Variable(0, synchronization=on_read)
    tree = {"variables": [mirrored, added], "model": kc.replicate(dense())}
    state.copies(added)[-1].assign(5)
    kc.assert_in_sync(tree)
    state.copies(mirrored)[-1].assign([1.0, 2.5])
    assert not kc.in_sync(tree)
    message = f"average.* differs between replica 0 and replica {MANY - 1}, by"
    with pytest.raises(kc.ReplicaMismatchError, match=message):
        kc.assert_in_sync(mirrored)
    kc.synchronize(tree, root=MANY - 1)
    kc.assert_in_sync(tree)
    np.testing.assert_array_equal(mirrored, [1.0, 2.5])


@pytest.mark.long
@several
def test_rows_that_repeat_leave_copies_equal():
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Embedding(100, 32)]
    )
    model.compile(keras.optimizers.SGD(0.1))
    kc.replicate(model, MANY)
    # Enough rows for several threads, which add them up in any order.
    rng = np.random.default_rng(0)
    values = tf.constant(rng.normal(size=(20_000, 32)), tf.float32)
    rows = tf.constant(rng.integers(0, 100, 20_000))

    @kc.withdevices
    def step():
        gradient = tf.IndexedSlices(values, rows, tf.constant([100, 32]))
        gradient = kc.allreduce("mean", gradient)
        model.optimizer.apply([gradient], model.trainable_variables)

    for _ in range(30):
        step()
    kc.assert_in_sync(model)
