"""What is promoted while a model trains leaves its functions alone."""

import threading

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


def test_a_model_whose_variables_stay_is_not_traced_again(monkeypatch):
    model = kc.replicate(dense("sgd"), MANY)
    model.fit(X, Y, **FIT)
    function = model.train_function
    kc.replicate(dense("sgd"), MANY).fit(X, Y, verbose=0)
    model.fit(X, Y, **FIT)
    assert model.train_function is function
    kc.unreplicate(model)
    kc.replicate(model, MANY)
    model.fit(X, Y, **FIT)
    assert model.train_function is not function
