"""What is promoted while a model trains leaves its functions alone."""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
from conftest import MANY
from conftest import several
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


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "meanwhile", [seed, make_a_metric, train_another_model]
)
def test_something_is_promoted_in_a_callback(meanwhile):
    one, many = dense(), kc.replicate(dense(), MANY)
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=meanwhile)
    expected = one.fit(X, Y, validation_data=(X, Y), **FIT)
    got = many.fit(X, Y, validation_data=(X, Y), callbacks=[callback], **FIT)
    assert_same_training(one, many, expected, got)


@pytest.mark.long
def test_a_model_is_replicated_again_in_a_callback():
    one, many = dense(), kc.replicate(dense(), MANY)
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=replicate_it_again(many)
    )
    expected = one.fit(X, Y, **FIT)
    got = many.fit(X, Y, callbacks=[callback], **FIT)
    assert_same_training(one, many, expected, got)


@pytest.mark.long
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


@pytest.mark.long
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


class Teacher(keras.layers.Layer):
    """Its answer is in the loss of a model that does not hold it."""

    def __init__(self):
        super().__init__()
        self.answer = self.add_weight(shape=(), initializer="ones")

    def distance(self, y, predicted):
        return keras.ops.mean((predicted - self.answer) ** 2)


@pytest.mark.long
def test_the_loop_reads_what_a_teacher_in_the_loss_has_learned():
    def losses(student, *moves):
        teacher, waiting = Teacher(), list(moves)

        def learn(epoch, logs=None):
            for move in waiting[:1]:
                waiting.remove(move)
                move(teacher)
            teacher.answer.assign(10.0 * epoch)

        learns = keras.callbacks.LambdaCallback(on_epoch_begin=learn)
        student.compile("sgd", teacher.distance, jit_compile=False)
        return student.fit(X, Y, callbacks=[learns], **FIT).history["loss"]

    def replicate(teacher):
        kc.replicate(teacher, MANY)

    expected = losses(dense())
    many = kc.replicate(dense(), MANY)
    got = losses(many, lambda _: None, replicate, kc.unreplicate)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_teacher_stays_where_it_is_while_a_plain_model_trains():
    teacher, student = Teacher(), dense()
    student.compile("sgd", teacher.distance, jit_compile=False)
    replicates = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kc.replicate(teacher, MANY)
    )
    with pytest.raises(kc.StrategyError, match=f"{student.name!r} is in `fit`"):
        student.fit(X, Y, callbacks=[replicates], **FIT)
    assert len(np.atleast_1d(teacher.answer.numpy())) == 1
    kc.replicate(teacher, MANY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("before", "change"),
    [(kc.replicate, kc.unreplicate), (kc.unreplicate, kc.replicate)],
)
def test_a_model_keeps_its_devices_while_it_runs(call, before, change):
    model = before(dense("sgd"))
    names = {"fit": "train", "evaluate": "test", "predict": "predict"}
    ends = f"on_{names[call]}_batch_end"
    changes = keras.callbacks.LambdaCallback()
    setattr(changes, ends, lambda batch, logs=None: change(model))
    data = (X,) if call == "predict" else (X, Y)
    message = f"{change.__name__}.*{model.name}.* in `{call}`.*before or after"
    with pytest.raises(kc.StrategyError, match=message):
        getattr(model, call)(*data, callbacks=[changes], verbose=0)
    change(model).fit(X, Y, verbose=0)


@pytest.mark.long
def test_a_part_of_a_model_keeps_its_devices_while_it_trains():
    model = kc.replicate(dense(), MANY)
    moves = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kc.unreplicate(model.layers[0])
    )
    with pytest.raises(kc.StrategyError, match=f"{model.name!r} is in `fit`"):
        model.fit(X, Y, callbacks=[moves], **FIT)


@pytest.mark.long
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


@pytest.mark.long
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


@several
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


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda: keras.utils.set_random_seed(7),
        lambda: kc.replicate(keras.metrics.Mean(), MANY),
        lambda: kc.replicate(dense("sgd"), MANY).train_on_batch(X, Y),
        lambda: kc.unreplicate(kc.replicate(trained(), MANY)),
    ],
    ids=["set_random_seed", "metric", "training", "moving"],
)
def test_what_a_model_does_not_read_does_not_trace_it_again(
    replicated, meanwhile
):
    model = Counting()
    model.compile("sgd", "mse", jit_compile=False)
    if replicated:
        kc.replicate(model, MANY)

    def run():
        model.train_on_batch(X, Y)
        model.predict(X, verbose=0)
        model.evaluate(X, Y, verbose=0)
        return model.traced

    run()
    before = run()
    meanwhile()
    assert run() == before


def trained():
    model = dense("sgd")
    model.train_on_batch(X, Y)
    return model


def test_a_new_seed_is_that_of_what_is_traced_from_then_on():
    def noise(model):
        numbers = []
        for _ in range(2):
            keras.utils.set_random_seed(0)
            numbers.append(model.predict(X, verbose=0))
        return numbers

    expected = noise(drawing())
    np.testing.assert_array_equal(noise(kc.replicate(drawing(), 1)), expected)
    assert (expected[0] != expected[1]).any()


def drawing():
    inputs = keras.Input((X.shape[1],))
    outputs = keras.layers.Lambda(
        lambda x: keras.random.normal(keras.ops.shape(x)),
        output_shape=lambda shape: shape,
    )(inputs)
    return keras.Model(inputs, outputs)


@several
def test_the_common_seed_goes_on_where_models_take_turns():
    one = [drawing(), drawing()]
    keras.utils.set_random_seed(0)
    expected = [model.predict(X, verbose=0) for model in one * 3]
    many = [kc.replicate(drawing(), [0]), kc.replicate(drawing(), [1])]
    keras.utils.set_random_seed(0)
    got = [model.predict(X, verbose=0) for model in many * 3]
    np.testing.assert_array_equal(got, expected)


def watched_by(model, devices=None):
    """Returns the losses of a model that draws, in whose fit another does."""
    other = drawing_and_learning()
    if devices:
        kc.replicate(other, devices)
    other.compile("sgd", "mse", jit_compile=False)

    def ask(epoch, logs=None):
        other.train_on_batch(X, Y)
        other.predict(X, verbose=0)

    asks = keras.callbacks.LambdaCallback(on_epoch_end=ask)
    options = dict(batch_size=11, epochs=3, shuffle=False, verbose=0)
    history = model.fit(X, Y, callbacks=[asks], **options)
    return history.history["loss"]


def drawing_and_learning(devices=None):
    keras.utils.set_random_seed(0)
    drawn = drawing()
    model = keras.Sequential([drawn, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return kc.replicate(model, devices) if devices else model


@several
@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [None, [0]], ids=["plain", "replicated"])
def test_the_common_seed_comes_back_to_the_model_that_trains(devices):
    expected = watched_by(drawing_and_learning())
    got = watched_by(drawing_and_learning(devices), [1])
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_part_of_a_plain_model_keeps_its_devices_before_it_is_traced():
    model = dense("sgd")
    begins = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: kc.replicate(model.layers[0], MANY)
    )
    with pytest.raises(kc.StrategyError, match="is in `fit`"):
        model.fit(X, Y, verbose=0, callbacks=[begins])
