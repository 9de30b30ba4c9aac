"""Keras' callbacks do and write what they do and write on one device."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from models import assert_same_training
from models import dense
from models import regression
from models import weights

import keras_conflux as kc

X, Y = regression(45)
FIT = dict(batch_size=16, shuffle=False, verbose=0)

CALLBACKS = {
    "early stopping": lambda path: keras.callbacks.EarlyStopping(
        "loss", patience=0, min_delta=1.0, restore_best_weights=True
    ),
    "checkpoint": lambda path: keras.callbacks.ModelCheckpoint(
        f"{path}/best.weights.h5", "loss", save_weights_only=True
    ),
    "log": lambda path: keras.callbacks.CSVLogger(f"{path}/log.csv"),
    "plateau": lambda path: keras.callbacks.ReduceLROnPlateau(
        "loss", patience=1, min_delta=10.0
    ),
    "schedule": lambda path: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.5
    ),
    "nan": lambda path: keras.callbacks.TerminateOnNaN(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_do_what_they_do_on_one_device(tmp_path, name):
    written = []
    models = (dense("adam"), kc.replicate(dense("adam"), MANY))
    for index, model in enumerate(models):
        folder = tmp_path / str(index)
        folder.mkdir()
        model.fit(X, Y, epochs=4, callbacks=[CALLBACKS[name](folder)], **FIT)
        written.append(sorted(path.name for path in folder.iterdir()))
    assert written[0] == written[1]
    assert_same_training(*models)
    if name == "checkpoint":
        loaded = dense("adam")
        loaded.load_weights(tmp_path / "1" / "best.weights.h5")
        np.testing.assert_allclose(
            weights(loaded), weights(models[0]), atol=1e-5
        )


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("save_freq", ["epoch", 2])
def test_backup_and_restore_resumes(tmp_path, save_freq):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    models = (dense("adam"), dense("adam"))
    for index, model in enumerate(models):
        backup = keras.callbacks.BackupAndRestore(
            tmp_path / str(index), save_freq=save_freq
        )
        if index:
            kc.replicate(model, MANY)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, epochs=4, callbacks=[backup, Stop()], **FIT)
    resumed = [dense("adam"), kc.replicate(dense("adam"), MANY)]
    for index, model in enumerate(resumed):
        backup = keras.callbacks.BackupAndRestore(
            tmp_path / str(index), save_freq=save_freq
        )
        model.fit(X, Y, epochs=4, callbacks=[backup], **FIT)
    assert_same_training(*resumed)
    if save_freq == "epoch":
        through = dense("adam")
        through.fit(X, Y, epochs=4, **FIT)
        assert_same_training(through, resumed[1])


def fitted(tmp_path, make, optimizer="adam", epochs=3):
    """Fits on one device and on many, each with a callback of its own."""
    models, callbacks = [], []
    for index in (0, 1):
        model = dense(optimizer()) if callable(optimizer) else dense(optimizer)
        if index:
            kc.replicate(model, MANY)
        callbacks.append(make(tmp_path / str(index)))
        model.fit(X, Y, epochs=epochs, callbacks=callbacks[-1:], **FIT)
        models.append(model)
    assert_same_training(*models)
    return models, callbacks


def scalars(folder):
    """Returns what TensorBoard would show, by tag and step."""
    found = {}
    for path in sorted(map(str, folder.rglob("events*"))):
        for record in tf.data.TFRecordDataset(path):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tag.startswith("epoch_"):
                    number = tf.make_ndarray(value.tensor)
                    found[value.tag, event.step] = float(number)
    return found


@pytest.mark.long
def test_tensorboard_shows_the_same(tmp_path):
    fitted(tmp_path, lambda path: keras.callbacks.TensorBoard(path))
    expected, got = scalars(tmp_path / "0"), scalars(tmp_path / "1")
    assert expected.keys() == got.keys()
    assert len(expected) >= 6
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-5, err_msg=str(key))


@pytest.mark.long
def test_averaged_weights_are_swapped(tmp_path):
    fitted(
        tmp_path,
        lambda path: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.5),
    )


@pytest.mark.long
def test_a_whole_model_is_saved_each_epoch(tmp_path):
    for index in (0, 1):
        (tmp_path / str(index)).mkdir()
    models, _ = fitted(
        tmp_path,
        lambda path: keras.callbacks.ModelCheckpoint(path / "{epoch}.keras"),
    )
    for epoch in (1, 2, 3):
        one, many = (
            keras.models.load_model(tmp_path / str(index) / f"{epoch}.keras")
            for index in (0, 1)
        )
        assert_same_training(one, many)
    np.testing.assert_array_equal(weights(many), weights(models[1]))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("remote", [False, True])
def test_functions_of_logs_get_the_same(tmp_path, remote, monkeypatch):
    sent = ([], [])
    if remote:
        module = pytest.importorskip("requests")
        monkeypatch.setattr(
            module,
            "post",
            lambda root, json, headers: sent[len(root)].append(json),
        )
        makes = iter(["", "r"])
        fitted(
            tmp_path,
            lambda path: keras.callbacks.RemoteMonitor(
                root=next(makes), path="", send_as_json=True
            ),
        )
    else:
        fitted(
            tmp_path,
            lambda path: keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: sent[int(path.name)].append(
                    {"epoch": epoch, **logs}
                )
            ),
        )
    assert len(sent[0]) == len(sent[1]) == 3
    for expected, got in zip(*sent, strict=True):
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5)


class Steering(keras.callbacks.Callback):
    """Tells a generator at each batch what the next one is to be."""

    def __init__(self):
        super().__init__()
        self.scale, self.drawn, self.begun = 1.0, [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(len(self.drawn))

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)  # in which a batch could be drawn ahead
        self.scale *= 0.9

    def on_epoch_begin(self, epoch, logs=None):
        self.scale += 1.0

    def batches(self, x, y):
        while True:
            self.drawn.append(self.scale)
            yield x, y * self.scale


def test_what_a_callback_tells_a_generator_is_in_the_next_batch(count):
    x, y = regression(24)
    callback = Steering()
    kc.replicate(dense("sgd"), count).fit(
        callback.batches(x, y),
        steps_per_epoch=4,
        epochs=2,
        callbacks=[callback],
        verbose=0,
    )
    # Keras draws the first batch of all before the first epoch begins. On one
    # device TensorFlow may draw others early, too.
    second = 2 * 0.9**4 + 1
    expected = [2 * 0.9, 2 * 0.9**2, 2 * 0.9**3]
    expected += [second * 0.9**step for step in range(4)]
    np.testing.assert_allclose(callback.drawn[-7:], expected)
    # A batch has been drawn before it begins, and at most one more: Keras has a
    # thread of TensorFlow draw one ahead, which may be late.
    early = 2 if count == 1 else 0
    ahead = np.subtract(callback.begun, range(1, 9))[early:]
    assert set(ahead) <= {0, 1}
    assert len(callback.drawn) == 9
