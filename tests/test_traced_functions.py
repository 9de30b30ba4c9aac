"""What is promoted while a model trains leaves its functions alone."""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
from conftest import MANY
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc

X, Y = regression(24)
FIT = dict(batch_size=8, epochs=3, shuffle=False, verbose=0)


def seed(epoch, logs=None):
    keras.utils.set_random_seed(epoch)


def make_a_metric(epoch, logs=None):
    kc.replicate(keras.metrics.Mean(), MANY)


def train_another_model(epoch, logs=None):
    kc.replicate(dense("sgd"), MANY).fit(X, Y, verbose=0)


def replicate_it_again(model):
    return lambda epoch, logs=None: kc.replicate(model)


@pytest.mark.parametrize(
    "meanwhile", [seed, make_a_metric, train_another_model]
)
def test_something_is_promoted_in_a_callback(meanwhile):
    one, many = dense(), kc.replicate(dense(), MANY)
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=meanwhile)
    expected = one.fit(X, Y, validation_data=(X, Y), **FIT)
    got = many.fit(X, Y, validation_data=(X, Y), callbacks=[callback], **FIT)
    assert_same_training(one, many, expected, got)


def test_a_model_is_replicated_again_in_a_callback():
    one, many = dense(), kc.replicate(dense(), MANY)
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=replicate_it_again(many)
    )
    expected = one.fit(X, Y, **FIT)
    got = many.fit(X, Y, callbacks=[callback], **FIT)
    assert_same_training(one, many, expected, got)


def test_other_models_are_promoted_in_another_thread():
    model = kc.replicate(dense(), MANY)
    began, ended = threading.Event(), threading.Event()

    def others():
        began.wait(60)
        for _ in range(2):
            kc.replicate(dense("sgd"), MANY).fit(X, Y, verbose=0)
        ended.set()

    thread = threading.Thread(target=others)
    thread.start()
    waits = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs=None: (
            began.set() if epoch == 1 else epoch == 2 and ended.wait(120)
        )
    )
    history = model.fit(
        X, Y, validation_data=(X, Y), callbacks=[waits], **FIT
    ).history
    thread.join()
    assert len(history["val_loss"]) == 3


def test_data_come_from_predictions_of_the_model_itself():
    def train(model):
        def batches():
            for _ in range(3):
                yield X[:8], 0.5 * model.predict(X[:8], verbose=0)

        model.predict(X, verbose=0)
        model.fit(batches(), steps_per_epoch=3, verbose=0)
        return model

    one, many = train(dense("sgd")), train(kc.replicate(dense("sgd"), MANY))
    for weight in (*one.weights, *many.weights):
        assert np.isfinite(weight.numpy()).all()


def test_a_teacher_that_is_only_in_the_loss_is_noticed():
    """Its variables are exchanged, which the student's step goes on to read."""
    teacher, student = dense("sgd"), dense("sgd")

    def follow(y, predicted):
        return keras.ops.mean((predicted - teacher.weights[-1]) ** 2)

    student.compile("sgd", follow, jit_compile=False)
    student.evaluate(X, Y, verbose=0)
    kc.unreplicate(kc.replicate(teacher, MANY))
    teacher.weights[-1].assign([50.0])
    expected = np.mean((student.predict(X, verbose=0) - 50.0) ** 2)
    got, _ = student.evaluate(X, Y, batch_size=24, verbose=0)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_another_model_on_other_devices_trains_in_a_callback():
    other = kc.replicate(dense("sgd"), 1)

    def train(epoch, logs=None):
        other.train_on_batch(X, Y)

    one, many = dense(), kc.replicate(dense(), MANY)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=train)
    expected = one.fit(X, Y, **FIT)
    got = many.fit(X, Y, callbacks=[callback], **FIT)
    assert_same_training(one, many, expected, got)
    other.train_on_batch(X, Y)


def test_a_model_whose_training_failed_is_freed():
    def fail(epoch, logs=None):
        raise RuntimeError("of the user")

    def train():
        model = kc.replicate(dense("sgd"), MANY)
        callback = keras.callbacks.LambdaCallback(on_epoch_end=fail)
        with pytest.raises(RuntimeError, match="of the user"):
            model.fit(X, Y, validation_data=(X, Y), callbacks=[callback], **FIT)
        return weakref.ref(model)

    model = train()
    keras.utils.clear_session()
    gc.collect()
    assert model() is None


class Counting(keras.Model):
    """Counts how often its step is traced; draws from the common seed."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.traced = 0

    def call(self, x):
        self.traced += 1
        return self.dense(x + keras.random.normal(keras.ops.shape(x)))


def test_models_on_different_devices_take_turns():
    models = [Counting(), Counting()]
    for model, devices in zip(models, ([0], [1]), strict=True):
        model.compile("sgd", "mse")
        kc.replicate(model, devices)

    def traced():
        for model in models:
            model.train_on_batch(X, Y)
        return [model.traced for model in models]

    before = [traced() for _ in range(2)][-1]
    assert [traced() for _ in range(3)] == [before] * 3


def test_the_common_seed_goes_on_where_models_take_turns():
    def noise():
        inputs = keras.Input((X.shape[1],))
        outputs = keras.layers.Lambda(
            lambda x: keras.random.normal(keras.ops.shape(x)),
            output_shape=lambda shape: shape,
        )(inputs)
        return keras.Model(inputs, outputs)

    one = [noise(), noise()]
    keras.utils.set_random_seed(0)
    expected = [model.predict(X, verbose=0) for model in one * 3]
    many = [kc.replicate(noise(), [0]), kc.replicate(noise(), [1])]
    keras.utils.set_random_seed(0)
    got = [model.predict(X, verbose=0) for model in many * 3]
    np.testing.assert_array_equal(got, expected)
