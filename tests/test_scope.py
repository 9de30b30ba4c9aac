"""In a strategy's scope, outside of replicas, all is as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several

import keras_conflux as kc

START = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32")


def in_scope(run):
    """Returns what `run()` returns on one device and in a scope."""
    keras.utils.set_random_seed(0)
    single = run()
    keras.utils.set_random_seed(0)
    with kc.ReplicatedStrategy(MANY):
        return single, run()


def updated(make_optimizer, gradient, traced, built):
    """Returns a variable after three updates of an optimizer."""
    variable = keras.Variable(START)
    optimizer = make_optimizer()
    if built:
        optimizer.build([variable])

    def update():
        optimizer.apply([gradient], [variable])

    update = tf.function(update) if traced else update
    for _ in range(3):
        update()
    assert kc.in_sync([variable, optimizer])
    return variable.numpy()


def scaled_sgd():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0
    )


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(0.1, use_ema=True),
    "accumulating": lambda: keras.optimizers.SGD(
        0.1, gradient_accumulation_steps=2
    ),
    "loss scale": scaled_sgd,
}


@pytest.mark.parametrize("built", [True, False], ids=["built", "new"])
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "eager"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_applies_once(name, traced, built):
    if traced and not built:
        pytest.skip("on one device, too, a function makes no variables twice")
    gradient = tf.constant(START / 7)
    single, scoped = in_scope(
        lambda: updated(OPTIMIZERS[name], gradient, traced, built)
    )
    np.testing.assert_allclose(scoped, single, rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "loss scale"])
def test_a_sparse_gradient_stays_sparse(name, monkeypatch):
    received = []
    original = keras.optimizers.SGD.update_step

    def update_step(optimizer, gradient, *args):
        received.append(type(gradient))
        return original(optimizer, gradient, *args)

    monkeypatch.setattr(keras.optimizers.SGD, "update_step", update_step)
    gradient = tf.IndexedSlices(tf.ones((2, 2)), [0, 2], (3, 2))
    make = scaled_sgd if name == "loss scale" else keras.optimizers.SGD
    single, scoped = in_scope(lambda: updated(make, gradient, False, True))
    np.testing.assert_allclose(scoped, single, rtol=1e-6)
    assert set(received) == {tf.IndexedSlices}


def test_a_loss_is_not_divided():
    y_true, y_pred = START, START[::-1].copy()
    single, scoped = in_scope(
        lambda: [
            keras.losses.MeanSquaredError()(y_true, y_pred).numpy(),
            keras.losses.MeanSquaredError(reduction="sum")(
                y_true, y_pred, sample_weight=[1, 2, 0]
            ).numpy(),
        ]
    )
    np.testing.assert_allclose(scoped, single, rtol=1e-6)


def train(traced):
    """Returns the weights and the loss of a loop that knows of no replicas."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.MeanSquaredError()

    def step():
        with tf.GradientTape() as tape:
            loss = loss_fn(START, model(START))
        # Keras' variables, not their values, are what a tape is asked for.
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    step = tf.function(step) if traced else step
    losses = [step().numpy() for _ in range(3)]
    assert kc.in_sync(model)
    return [*model.get_weights(), np.stack(losses)]


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "eager"])
def test_a_loop_on_a_tape_trains_the_same(traced):
    for single, scoped in zip(*in_scope(lambda: train(traced)), strict=True):
        np.testing.assert_allclose(scoped, single, rtol=1e-5, atol=1e-6)


def test_a_count_of_integers_is_whole():
    def confusion():
        metric = keras.metrics.MeanIoU(num_classes=2)
        metric.update_state([0, 1, 1], [0, 0, 1])
        metric.update_state([0], [0])
        return metric.total_cm.numpy()

    single, scoped = in_scope(confusion)
    np.testing.assert_array_equal(scoped, single)


def test_a_count_starts_once():
    def started():
        metric = keras.metrics.Metric()
        return metric.add_variable((2,), "ones", name="count").numpy()

    single, scoped = in_scope(started)
    np.testing.assert_array_equal(scoped, single)


def test_a_replicated_count_of_integers_is_whole_outside(count):
    metric = kc.replicate(keras.metrics.MeanIoU(num_classes=2), devices=count)
    metric.update_state([0, 1, 1], [0, 0, 1])
    np.testing.assert_array_equal(metric.total_cm.numpy(), [[1, 0], [1, 1]])


@several
def test_an_epoch_iterator_of_the_users_own_distributes():
    strategy = kc.ReplicatedStrategy(2)
    iterator = keras.src.backend.tensorflow.trainer.TFEpochIterator(
        x=START[:2], batch_size=2, distribute_strategy=strategy
    )
    for _, _, batches in iterator:
        x = next(batches)
        parts = strategy.experimental_local_results(x)
        np.testing.assert_array_equal(np.concatenate(parts), START[:2])


def test_none_for_an_optional_input(count):
    def fitted(devices):
        keras.utils.set_random_seed(0)
        inputs = [
            keras.Input((2,), optional=True, name="missing"),
            keras.Input((2,), name="present"),
        ]
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs[1]))
        model.compile("sgd", "mse")
        if devices:
            kc.replicate(model, devices=devices)
        model.fit([None, START[:, :2]], START[:, :1], batch_size=2, verbose=0)
        return model.predict([None, START[:, :2]], verbose=0)

    np.testing.assert_allclose(fitted(count), fitted(None), rtol=1e-5)


@several
def test_replicas_that_give_one_object_are_counted_each():
    variable_of = {}
    constant = tf.ones(2)

    def update():
        variable_of["optimizer"].apply([constant], [variable_of["variable"]])

    with kc.ReplicatedStrategy(2) as strategy:
        variable = variable_of["variable"] = keras.Variable([1.0, 2.0])
        optimizer = variable_of["optimizer"] = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
        strategy.run(update)  # eagerly
    np.testing.assert_array_equal(variable.numpy(), [-1.0, 0.0])


@several
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eager_replicas_build_an_optimizer_once(name):
    gradient = tf.constant(START / 7)
    single = updated(OPTIMIZERS[name], gradient, False, False)
    with kc.ReplicatedStrategy(2) as strategy:
        variable = keras.Variable(START)
        optimizer = OPTIMIZERS[name]()
        for _ in range(3):
            strategy.run(lambda: optimizer.apply([gradient / 2], [variable]))
    assert kc.in_sync([variable, optimizer])
    assert optimizer.iterations.numpy() == (1 if name == "accumulating" else 3)
    np.testing.assert_allclose(variable.numpy(), single, rtol=1e-6)


def test_a_count_is_restored_whole(count, tmp_path):
    def counted():
        metric = kc.replicate(keras.metrics.Metric(), devices=count)
        with kc.ReplicatedStrategy(count):
            metric.count = metric.add_variable((), "zeros", dtype="int32")
        return metric

    saved, restored = counted().count, counted().count
    saved.assign(7)
    path = tf.train.Checkpoint(count=saved).save(str(tmp_path / "saved"))
    tf.train.Checkpoint(count=restored).restore(path)
    assert restored.numpy() == 7
