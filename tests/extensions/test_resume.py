"""Trainings that are interrupted end as those that are not."""

import contextlib
import errno
import fcntl
import itertools
import os
import pathlib
import pty
import re
import shutil
import signal
import time
import warnings
from contextlib import nullcontext

import forked
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from conftest import ONE_AND_TWO
from conftest import RUN_LONG_TESTS
from conftest import several
from resume_cases import BATCH
from resume_cases import DATA
from resume_cases import GRAIN
from resume_cases import RANDOM
from resume_cases import SAMPLES
from resume_cases import STEPS
from resume_cases import Own
from resume_cases import Stateful
from resume_cases import X
from resume_cases import Y
from tensorflow.python.eager import context

import keras_conflux as kc
from keras_conflux._cluster import processes
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import fingerprint
from keras_conflux._extensions.resume import fit as resumed_fit
from keras_conflux._extensions.resume import signals
from keras_conflux._extensions.resume import stored_arrays
from keras_conflux._extensions.resume import writer
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.signals import Preemption

EPOCHS = 3


class Killed(Exception):
    """Ends a training, as a signal that nobody handles would."""


pytestmark = pytest.mark.usefixtures("deterministic")


class Kill(keras.callbacks.Callback):
    """Ends the training after so many steps."""

    def __init__(self, after=None):
        super().__init__()
        self.left = itertools.count() if after is None else iter(range(after))

    def on_train_batch_begin(self, batch, logs=None):
        if next(self.left, None) is None:
            raise Killed

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


def train(
    folder,
    data="arrays",
    devices=None,
    after=None,
    epochs=EPOCHS,
    resume=True,
    **options,
):
    """Runs the script of a user once; returns what it leaves behind."""
    resumed_fit.ended_here.clear()  # as in a process of its own
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, "relu"),
            layers.Dropout(0.3),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    if devices is not None:
        kc.replicate(model, devices)
    optimizer = keras.optimizers.Adam(
        0.01,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_overwrite_frequency=5,
        global_clipnorm=1.0,
    )
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    own = Own()
    best = folder / "best.weights.h5"
    callbacks = [
        Kill(after),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        own,
        keras.callbacks.EarlyStopping(
            "val_loss", patience=2, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.1),
        keras.callbacks.ModelCheckpoint(
            best, "val_loss", save_best_only=True, save_weights_only=True
        ),
    ]
    if resume:
        options = {"every": 1, **options}
        callbacks.insert(2, kc.Resume(folder / "resume", **options))
    history = model.fit(
        **(DATA | GRAIN)[data](),
        epochs=epochs,
        validation_data=(X[:8], Y[:8]),
        callbacks=callbacks,
        verbose=0,
    )
    found = {v.path: v.numpy() for v in model.variables}
    found |= {v.path: v.numpy() for v in optimizer.variables}
    found |= {"history": np.array([*history.history.values()])}
    found |= {"own": np.array([own.seen, *own.losses])}
    # Rows of an epoch that was trained again come twice.
    rows = (folder / "log.csv").read_text().splitlines()
    found |= {"csv": np.array([*dict.fromkeys(rows)])}
    model.load_weights(best)
    return found | {"best": model.get_weights()}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        for one, other in zip(
            keras.tree.flatten(got[name]),
            keras.tree.flatten(value),
            strict=True,
        ):
            assert np.array_equal(one, other), name


def new(folder, name):
    (folder / name).mkdir()
    return folder / name


SHORT = [
    ("tf.data, of unknown length", None),
    ("PyDataset", 2),
]


@several
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("data", "devices"),
    [
        case if case in SHORT else pytest.param(*case, marks=pytest.mark.long)
        for case in itertools.product(DATA, (None, 2))
    ],
)
def test_killed_again_and_again(tmp_path, data, devices):
    expected = train(new(tmp_path, "plain"), data, devices, resume=False)
    undisturbed = train(new(tmp_path, "undisturbed"), data, devices, every=4)
    assert_same(undisturbed, expected)
    folder = new(tmp_path, "killed")
    for after in (2, 4, 3, 2) if RUN_LONG_TESTS else (4, 3):
        with pytest.raises(Killed):
            train(folder, data, devices, after=after, every=1 + after % 2)
    assert_same(train(folder, data, devices), expected)


@pytest.mark.long
def test_a_pydataset_tells_its_state(tmp_path):
    data = "PyDataset with a state"
    expected = train(new(tmp_path, "plain"), data, None, resume=False)
    folder = new(tmp_path, "killed")
    with pytest.raises(Killed):
        train(folder, data, None, after=STEPS + 3, every=1)
    assert_same(train(folder, data, None), expected)


def test_a_state_of_a_pydataset_that_cannot_be_saved(tmp_path, monkeypatch):
    state = {"random": np.random.default_rng(3)}
    monkeypatch.setattr(Stateful, "state_dict", lambda _: state)
    expected = r"`Stateful.state_dict\(\)`\['random'\] .* a Generator\. Of a"
    with pytest.raises(TypeError, match=expected):
        train(tmp_path, "PyDataset with a state", None)


@pytest.mark.parametrize("devices", ONE_AND_TWO)
@pytest.mark.parametrize("data", GRAIN)
def test_killed_again_and_again_with_grain(tmp_path, data, devices):
    pytest.importorskip("grain", exc_type=ImportError)
    test_killed_again_and_again(tmp_path, data, devices)


@several
@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", [2, None])
def test_on_other_devices(tmp_path, before):
    """Without random numbers of replicas, results are equal to rounding."""

    def trained(folder, devices, after=None, **options):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        if devices:
            kc.replicate(model, devices)
        optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=4)
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
        history = model.fit(
            *(X, Y, BATCH, EPOCHS),
            verbose=0,
            callbacks=[Kill(after), kc.Resume(folder, every=1)],
        )
        return [*model.get_weights(), *history.history.values()]

    expected = trained(tmp_path / "undisturbed", None)
    for devices, after in ((before, 3), (MANY, 7)):
        with pytest.raises(Killed):
            trained(tmp_path / "killed", devices, after)
    got = trained(tmp_path / "killed", 1)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_what_is_done_is_not_done_again(tmp_path):
    at_once = train(new(tmp_path, "at once"), epochs=4)
    folder = new(tmp_path, "in two")
    train(folder, epochs=2)
    assert_same(train(folder, epochs=4), at_once)
    assert_same(train(folder, epochs=4, after=0), at_once)  # takes no step


def test_the_end_of_a_training_that_is_over_is_told_again(tmp_path):
    class Ending(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

        def on_train_end(self, logs=None):
            self.told = logs, self.model.stop_training

    once, again = Ending(), Ending()
    for each in (once, again):
        resumed_fit.ended_here.clear()
        linear(each, kc.Resume(tmp_path), epochs=3)
    assert once.told[1]
    assert again.told == once.told


def linear(
    *callbacks, inputs=5, data=None, optimizer="sgd", devices=None, **options
):
    """A small training, for what has nothing to do with its results."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(1)])
    if devices:
        kc.replicate(model, devices)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(1).normal(size=(SAMPLES, inputs))
    data = {"x": x, "y": Y, "batch_size": BATCH} if data is None else data
    model.fit(**data, verbose=0, callbacks=[*callbacks], **options)
    return model


def test_what_does_not_belong_together_is_refused(tmp_path):
    linear(kc.Resume(tmp_path), epochs=2)
    resume = kc.Resume(tmp_path)
    with pytest.raises(ValueError, match="another training"):
        linear(resume, inputs=6, epochs=3)
    for other, words in (
        ("adam", "with the optimizer SGD, which is Adam here"),
        (keras.optimizers.SGD(momentum=0.9), "Of the optimizer's variables"),
    ):
        with pytest.raises(ValueError, match=words):
            linear(resume, optimizer=other, epochs=3)
    other = {"x": X, "y": Y, "batch_size": 2}
    with pytest.raises(ValueError, match="batches in an epoch: 6, now 11"):
        linear(resume, data=other, epochs=3)
    with pytest.raises(ValueError, match="with the callbacks"):
        linear(resume, keras.callbacks.LambdaCallback(), epochs=3)
    with pytest.raises(ValueError, match="pass it alone"):
        linear(resume, keras.callbacks.BackupAndRestore(tmp_path / "b"))
    model, listed = linear(), keras.callbacks.CallbackList([resume])
    with pytest.raises(ValueError, match="Pass `fit` a list"):
        model.fit(X, Y, callbacks=listed, verbose=0)
    for wrong in ({"every": 0}, {"every": "soon"}, {"keep": 0}):
        with pytest.raises(ValueError, match="Received: "):
            kc.Resume(tmp_path, **wrong)
    with pytest.raises(ValueError, match="names of signals"):
        kc.Resume(tmp_path, signals=("SIGNAL",))


def test_optimizers_that_a_step_builds_are_named(tmp_path, recwarn):
    class Two(keras.Model):
        """Trains its halves by an optimizer each."""

        def __init__(self):
            super().__init__()
            self.left, self.right = (
                keras.Sequential([keras.Input((n,)), keras.layers.Dense(1)])
                for n in (5, 1)
            )

        def compile(self, ours):
            super().compile()
            self.ours = ours

        def train_step(self, data):
            x, y = data
            parts = [self.left, self.right]
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self.right(self.left(x)) - y) ** 2)
            for part, optimizer in zip(parts, self.ours, strict=True):
                variables = part.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(
                    zip(gradients, variables, strict=True)
                )
            return {"loss": loss}

    def trained(folder, is_built, after=None, **options):
        keras.utils.set_random_seed(7)
        model = Two()
        model.compile(ours=[keras.optimizers.Adam(), keras.optimizers.Adam()])
        if is_built:
            model.ours[0].build(model.left.trainable_variables)
            model.ours[1].build(model.right.trainable_variables)
        resume = kc.Resume(folder, every=1, **options)
        callbacks = [Kill(after), resume]
        model.fit(X, Y, BATCH, verbose=0, callbacks=callbacks)
        return model.get_weights() + [
            v.numpy() for optimizer in model.ours for v in optimizer.variables
        ]

    with pytest.raises(ValueError, match=r"builds these optimizers: adam.*, a"):
        trained(tmp_path / "strict", is_built=False, strict=True)
    killed = tmp_path / "killed"
    with (
        pytest.warns(kc.ConfluxWarning, match="builds these optimizers"),
        pytest.raises(Killed),
    ):
        trained(killed, is_built=False, after=2)
    with pytest.raises(ValueError, match=r"adam.*_momentum .*adam.* not built"):
        trained(killed, is_built=False)
    recwarn.clear()
    got = trained(killed, is_built=True)
    expected = trained(tmp_path / "plain", is_built=True)
    assert not recwarn.list
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_settings_of_compile_are_named(tmp_path, recwarn):
    def trained(optimizer, loss, epochs):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(optimizer, loss)
        resume = kc.Resume(tmp_path)
        model.fit(X, Y, BATCH, epochs, verbose=0, callbacks=[resume])
        return float(model.optimizer.learning_rate)

    adam, mse = keras.optimizers.Adam, keras.losses.MeanSquaredError()
    for epochs in (1, 2):
        trained(adam(), mse, epochs)
    assert not [each for each in recwarn if each.category is kc.ConfluxWarning]
    words = r"beta_1 was 0\.9 and is 0\.8; .*_rate was 0\.001 and is 0\.5"
    with pytest.warns(kc.ConfluxWarning, match=words):
        assert trained(adam(0.5, beta_1=0.8), mse, 3) < 0.1
    with pytest.warns(kc.ConfluxWarning, match="loss was 'Mean.* and is 'mae'"):
        trained(adam(0.5, beta_1=0.8), "mae", 4)


@pytest.mark.parametrize("size", [14, 16])
def test_another_batch_size_is_refused(tmp_path, size):
    def trained(size, epochs):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        resume = kc.Resume(tmp_path)
        model.fit(X, Y, size, epochs, verbose=0, callbacks=[resume])

    trained(14, 1)
    with (
        nullcontext()
        if size == 14
        else pytest.raises(ValueError, match="size: 14, now 16")
    ):
        trained(size, 2)


@pytest.mark.parametrize("name", ["mae", "mape"])
def test_other_metrics_are_named(tmp_path, name):
    def trained(metric, epochs):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric, keras.metrics.R2Score()])
        resume = kc.Resume(tmp_path)
        model.fit(X, Y, BATCH, epochs, verbose=0, callbacks=[resume])

    trained("mae", 1)
    _, named = named_settings(lambda: trained(name, 2))
    assert named == [[("metrics.0", "'mae'", "'mape'")]] * (name == "mape")


@pytest.mark.parametrize("is_frozen", [True, False])
def test_other_layers_that_a_loop_trains_are_named(tmp_path, is_frozen):
    def built():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    model = built()
    model.layers[0].trainable = not is_frozen
    kc.save(model, tmp_path, step=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kc.load(built(), tmp_path)
    words = "was 'dense, frozen' and is 'dense, trained'"
    assert [words in str(each.message) for each in said] == [True] * is_frozen


class Slower(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that cannot be saved."""

    def __call__(self, step):
        return 0.1


def with_optimizers(rate=0.1, decay=0.5, **options):
    """A model with optimizers as attributes."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(Slower()), "mse")
    decaying = keras.optimizers.schedules.ExponentialDecay(0.1, 9, decay)
    model.second = keras.optimizers.Adam(rate, **options)
    model.others = [keras.optimizers.SGD(decaying), keras.optimizers.Adam()]
    for each in (model.optimizer, model.second, *model.others):
        each.build(model.trainable_variables)
    return model


def named_settings(call):
    """Returns a call's result, and the settings that it says have changed."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = call()
    texts = [str(each.message) for each in said]
    return result, [
        re.findall(r"([\w.]+) was (\S+) and is (\S+)[;.] ", each)
        for each in texts
        if "not set as when" in each
    ]


OTHER_SETTINGS = [
    ("others.0.learning_rate.config.decay_rate", "0.5", "0.9"),
    ("second.clipnorm", "1", "None"),
    ("second.learning_rate", "0.1", "0.3"),
]


def test_other_settings_of_optimizers_in_attributes_are_named(tmp_path):
    def trained(model, epochs):
        resume = kc.Resume(tmp_path)
        model.fit(X, Y, BATCH, epochs, verbose=0, callbacks=[resume])

    def changed(epochs, **options):
        model = with_optimizers(**options)
        return named_settings(lambda: trained(model, epochs))[1]

    assert not changed(1, clipnorm=1.0)
    assert not changed(2, clipnorm=1.0)
    assert changed(3, rate=0.3, decay=0.9) == [OTHER_SETTINGS]


class Scaled(keras.losses.Loss):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def call(self, y, p):
        return self.scale * keras.ops.mean((y - p) ** 2, -1)


def test_other_settings_of_losses_are_named(tmp_path):
    def changed(epochs, loss):
        model = linear(epochs=0)
        model.compile("sgd", loss)
        resume = kc.Resume(tmp_path)
        return named_settings(
            lambda: model.fit(
                X, Y, BATCH, epochs, verbose=0, callbacks=[resume]
            )
        )[1]

    assert not changed(1, Scaled(2.0))
    assert not changed(2, Scaled(2.0))
    assert changed(3, Scaled(3.0)) == [[("loss.scale", "2", "3")]]


def test_other_weights_of_losses_are_named(tmp_path):
    def changed(epochs, weight):
        model = linear(epochs=0)
        model.compile("sgd", "mse", loss_weights=[weight])
        options = {"epochs": epochs, "callbacks": [kc.Resume(tmp_path)]}
        return named_settings(lambda: model.fit(X, Y, **options))[1]

    assert not changed(1, 2.0)
    assert not changed(2, 2.0)
    assert changed(3, 3.0) == [[("loss_weights.0", "2", "3")]]


def test_a_schedule_in_the_place_of_a_rate_is_refused(tmp_path):
    def trained(rate, epochs):
        model = linear(epochs=0)
        model.compile(keras.optimizers.SGD(rate), "mse")
        model.fit(X, Y, epochs=epochs, callbacks=[kc.Resume(tmp_path)])

    trained(0.1, 1)
    with pytest.raises(ValueError, match="only the checkpoint") as caught:
        trained(keras.optimizers.schedules.CosineDecay(0.1, 10), 2)
    assert "is built by its first batch" not in str(caught.value)


class OtherLoss(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (epoch + 1)
        if epoch == 1:
            self.model.compile(self.model.optimizer, "mae")
            self.model.make_train_function(force=True)


def test_a_loss_that_a_callback_has_changed_is_named(tmp_path):
    def changed(epochs):
        model = linear(epochs=0)
        callbacks = [kc.Resume(tmp_path), OtherLoss()]
        options = {"epochs": epochs, "callbacks": callbacks}
        return named_settings(lambda: model.fit(X, Y, **options))[1]

    assert not changed(1)
    assert not changed(2)
    assert changed(3) == [[("loss", "'mae'", "'mse'")]]


def test_other_settings_of_a_loop_are_named(tmp_path, monkeypatch):
    def loaded(**options):
        model = with_optimizers(**options)
        found, changed = named_settings(lambda: kc.load(model, tmp_path))
        model.second.learning_rate = 0.05  # as a loop may decay it
        kc.save(model, tmp_path, step=found.step + 1 if found else 1)
        assert not named_settings(lambda: kc.load(model, tmp_path))[1]
        return changed

    assert not loaded(clipnorm=1.0)
    assert not loaded(clipnorm=1.0)
    assert loaded(rate=0.3, decay=0.9) == [OTHER_SETTINGS]
    write = writer.write

    def write_as_before(root, position, model, state, keep):
        del state["compiled"]
        return write(root, position, model, state, keep)

    monkeypatch.setattr(writer, "write", write_as_before)
    loaded(rate=0.3, decay=0.9)
    assert not loaded(clipnorm=1.0)


def test_a_model_that_is_compiled_anew_has_other_settings(tmp_path):
    model = with_optimizers()
    kc.save(model, tmp_path, step=1)
    model.second = keras.optimizers.SGD(0.5, momentum=0.3)
    model.second.build(model.trainable_variables)
    kc.save(model, tmp_path, step=2)
    other = with_optimizers()
    other.second = keras.optimizers.SGD(0.5, momentum=0.3)
    other.second.build(other.trainable_variables)
    _, changed = named_settings(lambda: kc.load(other, tmp_path))
    assert not changed


def test_an_optimizer_that_has_trained_since_is_refused(tmp_path):
    model = linear(epochs=0)
    kc.save(model, tmp_path, step=0)
    model.train_on_batch(X[:4], Y[:4])
    with pytest.raises(ValueError, match="before the optimizer had done a"):
        kc.load(model, tmp_path)
    model.compile("sgd", "mse")
    assert kc.load(model, tmp_path).step == 0


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Sequential", "a class of one's own"])
def test_a_model_that_is_built_by_fit(tmp_path, kind):
    class OfOnesOwn(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(3, "relu")
            self.outer = keras.layers.Dense(1)

        def call(self, inputs):
            return self.outer(self.inner(inputs))

    def trained(folder, after=None):
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers) if kind[0] == "S" else OfOnesOwn()
        model.compile("adam", "mse", jit_compile=False)
        callbacks = [Kill(after), kc.Resume(folder, every=1)]
        model.fit(X, Y, BATCH, epochs=2, verbose=0, callbacks=callbacks)
        return [v.numpy() for v in (*model.weights, *model.optimizer.variables)]

    with pytest.raises(Killed):
        trained(tmp_path / "killed", after=STEPS + 2)
    got, expected = trained(tmp_path / "killed"), trained(tmp_path / "plain")
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Freezing(keras.callbacks.Callback):
    """Freezes a layer, or its kernel, in the second epoch."""

    def __init__(self, is_forced, is_kernel):
        super().__init__()
        self.is_forced, self.is_kernel = is_forced, is_kernel

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            layer = self.model.layers[0]
            (layer.kernel if self.is_kernel else layer).trainable = False
            if self.is_forced:
                self.model.make_train_function(force=True)


@pytest.mark.long
@pytest.mark.parametrize("devices", ONE_AND_TWO)
@pytest.mark.parametrize("is_kernel", [False, True])
def test_layers_that_a_callback_has_frozen(tmp_path, devices, is_kernel):
    def trained(folder, after=None, is_forced=True):
        keras.utils.set_random_seed(7)
        layers = keras.layers
        model = keras.Sequential(
            [layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]
        )
        if devices:
            kc.replicate(model, devices)
        model.compile("adam", "mse", jit_compile=False)
        resume = kc.Resume(folder, every=1)
        callbacks = [Kill(after), Freezing(is_forced, is_kernel), resume]
        model.fit(X, Y, SAMPLES // 2, 3, verbose=0, callbacks=callbacks)
        return [v.numpy() for v in (*model.weights, *model.optimizer.variables)]

    expected, killed = trained(tmp_path / "plain"), tmp_path / "killed"
    with pytest.raises(Killed):
        trained(killed, after=4)
    for one, other in zip(trained(killed), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    if devices is None:
        with pytest.warns(kc.ConfluxWarning, match=r"function\(force=True\)"):
            trained(tmp_path / "not forced", is_forced=False)


@pytest.mark.long
def test_throughput_is_measured_anew(tmp_path):
    speed, options = kc.Throughput(), {"epochs": 2, "devices": 1}
    with pytest.raises(Killed):
        linear(kc.Resume(tmp_path, every=1), speed, Kill(8), **options)
    model = linear(kc.Resume(tmp_path), kc.Throughput(), Kill(), **options)
    assert len(model.history.history["samples_per_second"]) == 2
    assert min(model.history.history["samples_per_second"]) > 0


def test_each_training_of_a_process_has_a_directory(tmp_path):
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True)
    callbacks = [kc.Resume(tmp_path / "r"), log]
    linear(*callbacks, epochs=1)
    linear(*callbacks, epochs=2)  # more of the same
    rows = (tmp_path / "log.csv").read_text()
    for options in ({"epochs": 2}, {"epochs": 4, "initial_epoch": 2}):
        with pytest.raises(ValueError, match="a directory of its own"):
            linear(*callbacks, **options)
    assert (tmp_path / "log.csv").read_text() == rows
    shutil.rmtree(tmp_path / "r")
    linear(kc.Resume(tmp_path / "r"), epochs=1)


def test_fewer_epochs_than_were_trained_are_refused(tmp_path):
    with pytest.raises(Killed):
        linear(kc.Resume(tmp_path, every=1), Kill(STEPS + 3), epochs=3)
    with pytest.raises(ValueError, match=r"epoch 1, step \d.* of 1 epochs"):
        linear(kc.Resume(tmp_path), Kill(), epochs=1)
    linear(kc.Resume(tmp_path), Kill(), epochs=3)


def test_two_trainings_do_not_share_a_directory(tmp_path):
    class Second(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            with pytest.raises(RuntimeError, match="Another training"):
                linear(kc.Resume(tmp_path))

    linear(kc.Resume(tmp_path), Second())


SAVED_BESIDE = """
import sys
import keras
import keras_conflux as kc
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
kc.save(model, sys.argv[1], step=2)
"""


def test_processes_that_have_not_met_do_not_save_together(tmp_path):
    model, directory = linear(), tmp_path / "r"
    (tmp_path / "link").symlink_to(directory)
    for each in (directory, tmp_path / "link"):
        kc.save(model, each, step=1)
        found = forked.run("-c", SAVED_BESIDE, str(directory))
        assert "Another training writes its checkpoints" in found.stderr
        assert "keras_conflux.initialize()` first" in found.stderr
    shutil.rmtree(directory)
    kc.save(model, directory, step=1)
    assert forked.run("-c", SAVED_BESIDE, str(directory)).returncode == 1


@pytest.mark.parametrize(
    "use",
    [
        kc.Resume,
        kc.checkpoints,
        lambda directory: kc.save(linear(), directory, step=1),
        lambda directory: kc.load(linear(), directory),
    ],
)
def test_a_url_is_no_directory(use):
    for url in ("gs://bucket/run", pathlib.Path("gs://bucket/run")):
        with pytest.raises(ValueError, match="network file system"):
            use(url)


@several
@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("samples", ["other", "moved", "the same"])
def test_other_samples_are_noticed(tmp_path, samples, steps):
    def trained(after, x):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        kc.replicate(model, 2)
        model.compile(
            "sgd", "mse", steps_per_execution=steps, jit_compile=False
        )
        data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH)
        callbacks = [Kill(after), kc.Resume(tmp_path, every=1)]
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)

    with pytest.raises(Killed):
        trained(7 if steps == 1 else 4, X)
    if samples == "other":
        with pytest.raises(ValueError, match="The data is another"):
            trained(None, X[::-1])
    elif samples == "moved":
        told = "slightly other values"
        with pytest.warns(kc.ConfluxWarning, match=told):
            trained(None, X * np.float32(1.01))
    else:  # as another processor prepares them
        trained(None, X * np.float32(1 + 1e-5))


def test_data_that_ends_earlier_now(tmp_path):
    def data(samples):
        found = tf.data.Dataset.from_tensor_slices((X[:samples], Y[:samples]))
        # Its length is not known, so it cannot be compared.
        return {"x": found.filter(lambda x, y: True).batch(BATCH)}

    with pytest.raises(Killed):
        linear(kc.Resume(tmp_path, every=1), Kill(5), data=data(SAMPLES))
    with pytest.raises(ValueError, match="ends after 2 batches, and 4 had"):
        linear(kc.Resume(tmp_path), Kill(), data=data(2 * BATCH))


def test_parts_go_on_in_as_many_processes():
    saved = Saved(pathlib.Path("a"), {"parts": [{}, {}]})
    fingerprint.assert_as_many_parts(saved, 2)
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"2 part.*here it is in {count}"):
            fingerprint.assert_as_many_parts(saved, count)


def test_a_batch_is_known_again():
    pixels = RANDOM.integers(0, 256, [64, 8, 8, 3])
    rounded = np.clip(pixels + RANDOM.integers(-1, 2, pixels.shape), 0, 255)
    other = np.concatenate([pixels[:60], pixels[:4]])
    words = np.array(["a", "b", "c", "d"])
    masks = np.where(pixels < 128, -np.inf, pixels)
    same, near, far = (0, 0), (fingerprint.SMALL, 1), (1, np.inf)
    for one, two, (least, most) in (
        (pixels, rounded, near),
        (pixels, other, far),
        (pixels, pixels[:60], far),
        (pixels, pixels * (1 + 1e-6), (0, fingerprint.SMALL)),
        (masks, masks, same),
        (masks, np.where(other < 128, -np.inf, other), far),
        (words, words, same),
        (words, words[::-1], far),
        (words, pixels, far),
        (0 * pixels, 0 * pixels, same),
        (0 * pixels, 1 + 0 * pixels, far),
    ):
        one, two = ({"x": tf.constant(each)} for each in (one, two))
        first, second = map(fingerprint.sketch, (one, two))
        assert least <= fingerprint.gap(first, second) <= most


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="may write to"):
        linear(kc.Resume(tmp_path / "file" / "inside"))


@pytest.mark.skipif(ON_GPU, reason="deterministic ops refuse to have no seed")
def test_data_that_varies_is_named(tmp_path):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    seeded = data.shuffle(9, seed=1).batch(4)
    linear(kc.Resume(tmp_path / "a", strict=True), data={"x": seeded})
    cases = {
        "deterministic=False": data.map(
            lambda x, y: (x, y), num_parallel_calls=2, deterministic=False
        ).batch(4),
        "shuffles without a seed": unseeded(lambda: data.shuffle(9)).batch(4),
        "RandomStandardNormal": unseeded(
            lambda: data.map(lambda x, y: (x + tf.random.normal([5]), y))
        ).batch(4),
    }
    for words, varying in cases.items():
        with pytest.raises(ValueError, match=words):
            linear(kc.Resume(tmp_path / "b", strict=True), data={"x": varying})
        with pytest.warns(kc.ConfluxWarning, match=words):
            linear(kc.Resume(tmp_path / words), data={"x": varying})


def test_a_seed_that_processes_have_drawn_is_none(tmp_path, monkeypatch):
    """As `kc.initialize` does where the program has set none."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9, 1).batch(4)
    monkeypatch.setattr(processes._present, "drawn_seed", 5)
    linear(kc.Resume(tmp_path / "a", strict=True), data={"x": data})
    linear(kc.Resume(tmp_path / "b", strict=True), shuffle=True)
    # That of `linear`.
    monkeypatch.setattr(processes._present, "drawn_seed", 7)
    with pytest.raises(ValueError, match="shuffles without a seed"):
        linear(kc.Resume(tmp_path / "c", strict=True), data={"x": data})
    with pytest.raises(ValueError, match="`RandomShuffle` without a seed"):
        linear(kc.Resume(tmp_path / "d", strict=True), shuffle=True)


def unseeded(make):
    """Makes data as a program does that has given TensorFlow no seed."""
    context.context()._set_global_seed(None)
    return make()


def newest(directory):
    return kc.checkpoints(directory)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["model.weights.h5", "state.npz"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path, name, harm):
    linear(kc.Resume(tmp_path, every=1), epochs=2)
    last = newest(tmp_path)
    path = last.path / name
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif harm == "cut":
        path.write_bytes(content[:-7])
    else:
        path.unlink()
    assert name in (newest(tmp_path).damage or "")
    resume = kc.Resume(tmp_path)
    with pytest.warns(kc.ConfluxWarning, match=f"is not used: {name}"):
        linear(resume, epochs=2)
    assert resume.resumed_at == (1, STEPS - 1)


def test_a_checkpoint_that_cannot_be_read_now_is_passed_over(
    tmp_path, monkeypatch
):
    linear(kc.Resume(tmp_path, every=1), epochs=2)

    def fail(folder, name):
        if folder == last:
            raise OSError(errno.EIO, "Input/output error")
        return digest_of(folder, name)

    last, digest_of = newest(tmp_path).path, checkpoint_files.digest_of
    monkeypatch.setattr(checkpoint_files, "digest_of", fail)
    with pytest.warns(kc.ConfluxWarning, match="Input/output.*before it is"):
        linear(kc.Resume(tmp_path), epochs=2)
    # The same step was saved once more, behind the one that was there.
    assert newest(tmp_path).path.name == f"{last.name}.1"


def test_new_checkpoints_stay_where_damaged_ones_were(tmp_path):
    linear(kc.Resume(tmp_path, keep=1), epochs=2)
    (newest(tmp_path).path / "state.npz").write_bytes(b"")
    with (
        pytest.warns(kc.ConfluxWarning, match=r"There is no other\."),
        pytest.raises(Killed),
    ):
        linear(kc.Resume(tmp_path, every=1, keep=1), Kill(4), epochs=2)
    damaged, whole = kc.checkpoints(tmp_path)
    assert damaged.damage
    assert (whole.step, whole.damage) == (4, None)
    with pytest.warns(kc.ConfluxWarning, match="before it is used"):
        linear(kc.Resume(tmp_path, keep=1), Kill(), epochs=2)
    (whole,) = kc.checkpoints(tmp_path)
    assert (whole.step, whole.damage) == (2 * STEPS, None)


def test_a_loop_goes_on_before_a_damaged_step(tmp_path):
    model = linear()
    for step in (1, 9):
        kc.save(model, tmp_path, step=step, state=step)
    (newest(tmp_path).path / "state.npz").write_bytes(b"")
    with pytest.warns(kc.ConfluxWarning, match="before it is used"):
        assert kc.load(model, tmp_path) == (1, 1)
    kc.save(model, tmp_path, step=2)
    assert [each.step for each in kc.checkpoints(tmp_path)] == [9, 2]


def test_a_directory_that_has_a_later_step(tmp_path):
    model = linear()
    for step in (9, 10, 10):
        kc.save(model, tmp_path, step=step)
    with pytest.raises(ValueError, match=r"000010-.*later step.*step=5"):
        kc.save(model, tmp_path, step=5)
    assert [each.step for each in kc.checkpoints(tmp_path)] == [10, 9]


@pytest.mark.parametrize("until", [0, 1])
def test_checkpoints_that_go_while_they_are_listed(
    tmp_path, monkeypatch, until
):
    """As a training does that writes there."""
    model = linear()
    for step in (1, 2):
        kc.save(model, tmp_path, step=step)
    oldest = kc.checkpoints(tmp_path)[1].path
    digest_of, digests = checkpoint_files.digest_of, itertools.count()

    def removing(folder, name):
        # The newer one has a digest, and then comes that of this one.
        if next(digests) == until:
            shutil.rmtree(oldest)
        return digest_of(folder, name)

    monkeypatch.setattr(checkpoint_files, "digest_of", removing)
    assert [each.step for each in kc.checkpoints(tmp_path)] == [2]


def test_a_newer_format_is_refused(tmp_path):
    linear(kc.Resume(tmp_path))
    path = newest(tmp_path).path / "state.npz"
    with open(path, "rb") as file:
        state, arrays = stored_arrays.read(file)
    stored_arrays.write(path, state | {"format": 99}, arrays)
    with pytest.raises(ValueError, match="Install the version"):
        linear(kc.Resume(tmp_path))


class Forking(keras.callbacks.Callback):
    """Has a child that is told to end, and one that outlives the training."""

    def on_epoch_begin(self, epoch, logs=None):
        self.ended, self.left = self.child(), self.child()
        os.kill(self.ended, signal.SIGTERM)
        _, self.status = os.waitpid(self.ended, 0)

    @staticmethod
    def child():
        with warnings.catch_warnings():  # there are threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        return child


def test_children_are_no_trainings(tmp_path):
    forking = Forking()
    linear(kc.Resume(tmp_path), forking, epochs=1)
    try:
        assert os.WTERMSIG(forking.status) == signal.SIGTERM
        with pytest.raises(ValueError, match="not train anew"):  # by no other
            linear(kc.Resume(tmp_path), forking, epochs=1)
    finally:
        os.kill(forking.left, signal.SIGKILL)
        os.waitpid(forking.left, 0)


def two_outputs():
    given = keras.Input((5,))
    one, two = keras.layers.Dense(3)(given), keras.layers.Dense(1)(given)
    return keras.Model(given, {"one": one, "two": two})


COMPILED = {
    "of a name": {"metrics": ["accuracy"], "weighted_metrics": ["mse"]},
    "of each output": {"metrics": {"one": ["mae"], "two": ["mse", "accuracy"]}},
    "built by values": {"metrics": [keras.metrics.F1Score]},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", ONE_AND_TWO)
@pytest.mark.parametrize("name", COMPILED)
def test_a_model_is_loaded_before_its_first_step(tmp_path, name, devices):
    y = np.abs(X[:8, :3])

    def made():
        keras.utils.set_random_seed(7)
        several = "output" in name
        options = {
            kind: keras.tree.map_structure(
                lambda x: x() if isinstance(x, type) else x, metrics
            )
            for kind, metrics in COMPILED[name].items()
        }
        one = [keras.Input((5,)), keras.layers.Dense(3, "softmax")]
        model = two_outputs() if several else keras.Sequential(one)
        if devices:
            kc.replicate(model, devices=devices)
        model.compile("adam", "mse", **options)
        model.optimizer.build(model.trainable_variables)
        targets = {"one": y, "two": y[:, :1]} if several else y
        return model, lambda: model.train_on_batch(
            X[:8], targets, return_dict=True
        )

    model, train = made()
    train()
    kc.save(model, tmp_path, step=1)
    other, train_on = made()
    assert kc.load(other, tmp_path).step == 1
    for a, b in zip(other.variables, model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), a.path)
    assert [a.name for a in other.metrics] == [a.name for a in model.metrics]
    expected = train()
    for key, value in train_on().items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-5)


class OfAPart(keras.Model):
    """A step that trains some of the weights."""

    def __init__(self):
        super().__init__()
        self.on, self.target = (keras.layers.Dense(1) for _ in range(2))

    def call(self, x):
        return self.on(x) + self.target(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        weights = self.on.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.long
def test_an_optimizer_of_some_of_the_weights(tmp_path):
    def trained(devices, *callbacks, epochs=2):
        keras.utils.set_random_seed(7)
        model = OfAPart()
        if devices:
            kc.replicate(model, devices=devices)
        model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        )
        model.fit(
            X, Y, 8, epochs, verbose=0, shuffle=False, callbacks=[*callbacks]
        )
        return model

    expected = [v.numpy() for v in trained(None).optimizer.variables]
    for number, (before, after) in enumerate([(2, None), (None, 2)]):
        folder = tmp_path / str(number)
        trained(before, kc.Resume(folder), epochs=1)
        model = trained(after, kc.Resume(folder))
        found = [v.numpy() for v in model.optimizer.variables]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    found = trained(2).optimizer.variables
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-6)


def test_a_full_disk_does_not_end_training(tmp_path, monkeypatch):
    linear(kc.Resume(tmp_path), epochs=1)
    before = newest(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.warns(kc.ConfluxWarning, match="No space left"):
        linear(kc.Resume(tmp_path), epochs=2)
    assert [each.path for each in kc.checkpoints(tmp_path)] == [before.path]
    assert {each.name for each in tmp_path.iterdir()} == {
        ".lock",
        before.path.name,
    }


def test_only_so_many_are_kept(tmp_path):
    linear(kc.Resume(tmp_path, every=2, keep=3), epochs=2)
    assert [each.step for each in kc.checkpoints(tmp_path)] == [12, 10, 8]
    assert kc.checkpoints(tmp_path / "nothing") == []


def test_killed_while_an_old_one_is_removed(tmp_path, monkeypatch):
    def remove_a_file_and_end(path):
        os.unlink(path)
        raise Killed

    linear(kc.Resume(tmp_path, every=2, keep=9))
    monkeypatch.setattr(pathlib.Path, "unlink", remove_a_file_and_end)
    model = linear()
    with pytest.raises(Killed):
        kc.save(model, tmp_path, step=99, keep=1)
    monkeypatch.undo()
    assert not any(each.damage for each in kc.checkpoints(tmp_path))
    kc.save(model, tmp_path, step=99, keep=1)
    (left,) = kc.checkpoints(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {
        ".lock",
        left.path.name,
    }


def test_killed_while_one_is_written(tmp_path, monkeypatch):
    def killed(*_, **__):
        raise Killed

    model = linear()
    with monkeypatch.context() as patched:
        patched.setattr("numpy.savez", killed)
        patched.setattr(writer, "remove", lambda *_: None)
        with pytest.raises(Killed):
            kc.save(model, tmp_path, step=1)
    assert len([*tmp_path.glob(".step-*")]) == 1
    (tmp_path / ".step-000000000002-000000").mkdir()  # killed even earlier
    kc.save(model, tmp_path, step=3)
    assert {each.name for each in tmp_path.iterdir()} == {
        ".lock",
        "step-000000000003-000000",
    }


OTHERS = (
    ".step-notes/a.txt",
    ".step-notes.former/a.txt",
    ".step-000000000001-000000/notes.txt",
    "step-000000000001-000000/model.weights.h5",
    "step-000000000002-000000/notes.txt",
    "damaged-step-000000000001-000000/model.weights.h5",
    "state.npz",
    "project/.env",
)


def test_files_of_others_stay(tmp_path):
    directory, outside = tmp_path / "runs", tmp_path / "outside"
    model = linear()
    kc.save(model, directory, step=2)
    kc.save(model, outside, step=3)
    for name in OTHERS:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (directory / ".step-000000000004-000000").symlink_to(outside)
    (directory / "step-000000000003-000000").symlink_to(
        outside / "step-000000000003-000000"
    )
    (directory / "empty").mkdir()
    before = everything(directory), everything(outside)
    for step in (10, 11):
        kc.save(model, directory, step=step, keep=1)
    after = everything(directory), everything(outside)
    assert after[1] == before[1]
    assert {path: after[0].get(path) for path in before[0]} == before[0]
    new = {path.relative_to(directory) for path in after[0].keys() - before[0]}
    name = pathlib.Path("step-000000000011-000000")
    files = "model.weights.h5", "state.npz"
    assert new == {name, *(name / file for file in files)}


def everything(folder):
    """Returns all that lies in a folder, with what is in files."""
    return {
        path: path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def test_a_checkpoint_with_files_of_others_is_not_removed(tmp_path):
    model = linear()
    kc.save(model, tmp_path, step=1)
    (first,) = (each.path for each in kc.checkpoints(tmp_path))
    (first / "notes.txt").write_text("mine")
    for step in (2, 3):
        kc.save(model, tmp_path, step=step, keep=1)
    assert len(kc.checkpoints(tmp_path)) == 2
    assert (first / "notes.txt").read_text() == "mine"


def test_files_of_others_stay_where_a_step_is_saved_once_more(tmp_path):
    model = linear()
    for state in range(3):
        kc.save(model, tmp_path, step=1, state=state)
        assert kc.load(model, tmp_path).state == state
        (newest(tmp_path).path / "notes.txt").write_text(f"mine {state}")
    assert sorted(p.read_text() for p in tmp_path.rglob("notes.txt")) == [
        "mine 0",
        "mine 1",
        "mine 2",
    ]
    assert len(kc.checkpoints(tmp_path)) == 3
    assert not [*tmp_path.glob(".step-*")]


@pytest.mark.parametrize("content", ["link", "mine"])
def test_a_lock_of_others_is_not_written_to(tmp_path, content):
    directory, mine = tmp_path / "runs", tmp_path / "mine"
    directory.mkdir()
    lock = directory / ".lock"
    mine.write_text(content)
    refused = contextlib.nullcontext()
    if content == "link":
        lock.symlink_to(mine)
        refused = pytest.raises(OSError, match=r"cannot be written to.*\.lock")
    else:
        mine.rename(lock)
    with refused:
        linear(kc.Resume(directory))
    assert lock.read_text() == content


def test_a_step_that_is_saved_once_more(tmp_path, monkeypatch):
    """One of both is there, whenever the process is killed or a disk fails."""
    model = linear()
    kc.save(model, tmp_path, step=5, state=1)

    def busy(path):
        raise OSError("busy")

    monkeypatch.setattr(pathlib.Path, "unlink", busy)
    with pytest.warns(kc.ConfluxWarning, match="could not be removed: busy"):
        kc.save(model, tmp_path, step=5, state=2)
    assert kc.load(model, tmp_path).state == 2
    monkeypatch.undo()

    def full(self, other):
        raise OSError("full")

    monkeypatch.setattr(pathlib.Path, "rename", full)
    with pytest.raises(OSError, match="full"):
        kc.save(model, tmp_path, step=5, state=3)
    monkeypatch.undo()
    assert kc.load(model, tmp_path).state == 2
    for state in range(4, 16):
        kc.save(model, tmp_path, step=5, state=state)
        assert kc.load(model, tmp_path).state == state
    assert len([x for x in tmp_path.iterdir() if x.name != ".lock"]) == 1


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Mount it with locks"):
        linear(kc.Resume(tmp_path))
    with pytest.raises(OSError, match="Mount it with locks"):
        kc.save(linear(), tmp_path, step=1)


def test_plain_keras_reads_the_weights(tmp_path):
    model = linear(kc.Resume(tmp_path), optimizer="adam")
    other = linear(optimizer="adam")
    other.load_weights(newest(tmp_path).path / "model.weights.h5")
    for one, two in zip(
        [*model.weights, *model.optimizer.variables],
        [*other.weights, *other.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(one.numpy(), two.numpy())


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
)
@pytest.mark.parametrize(
    ("where", "epoch", "step"),
    [
        ("on_train_batch_end", 0, 1),
        ("on_test_batch_end", 1, STEPS),
        ("on_train_end", 3, 3 * STEPS),
    ],
)
def test_a_signal_ends_training_with_a_checkpoint(
    tmp_path, number, where, epoch, step
):
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` ignores SIGHUP

    def sent(*_, **__):
        os.kill(os.getpid(), number)

    callback = keras.callbacks.Callback()
    setattr(callback, where, sent)
    handler = signal.getsignal(number)
    resume = kc.Resume(tmp_path, every="1h")
    with pytest.raises(SystemExit) as ended:
        linear(resume, callback, epochs=3, validation_data=(X, Y))
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is handler
    signal.signal(number, before)
    last = newest(tmp_path)
    assert (last.epoch, last.step) == (epoch, step)


def test_a_signal_that_nobody_has_obeyed_comes_again():
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *given: received.append(1))
    with Preemption(("SIGUSR1",)).noted():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not received
    signal.signal(signal.SIGUSR1, before)
    assert received


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Preemption(("SIGHUP",)).noted():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_goes_to_a_closed_terminal_does_not_fail():
    """A progress bar would end the training before its last checkpoint."""
    own, terminal = pty.openpty()
    signals.silence_closed([terminal])
    os.write(terminal, b"there")
    assert os.read(own, 10) == b"there"
    os.close(own)
    with pytest.raises(OSError, match="Input/output"):
        os.write(terminal, b"lost")
    signals.silence_closed([terminal])
    os.write(terminal, b"lost")
    os.close(terminal)


KILLED = """
import os, sys
sys.path[:0] = [sys.argv[1], os.path.join(sys.argv[1], 'extensions')]
import test_resume, pathlib
steps = int(sys.argv[3])
fsync, calls = os.fsync, iter(range(steps))
def dying(descriptor):
    if next(calls, None) is None:
        os.kill(os.getpid(), 9)
    fsync(descriptor)
os.fsync = dying
test_resume.linear(test_resume.kc.Resume(sys.argv[2], every=1), epochs=2)
"""


@pytest.mark.parametrize("calls", [9, pytest.param(14, marks=pytest.mark.long)])
def test_killed_while_a_checkpoint_is_written(tmp_path, calls):
    """A process that is killed for real, where a write waits for the disk."""
    here = str(pathlib.Path(__file__).parents[1])
    result = forked.run("-c", KILLED, here, tmp_path, calls)
    assert result.returncode == -9, result.stderr
    assert all(each.damage is None for each in kc.checkpoints(tmp_path))
    resume = kc.Resume(tmp_path)
    model = linear(resume, epochs=2)
    assert resume.resumed_at is not None
    expected = linear(epochs=2)
    for one, two in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())


def test_a_program_that_has_never_set_a_seed(tmp_path, monkeypatch):
    model = linear()
    monkeypatch.delattr(context.context(), "_rng")
    kc.save(model, tmp_path, step=1, state="whole")
    assert kc.load(model, tmp_path).state == "whole"


def test_no_checkpoint_is_told_from_one_without_a_state(tmp_path):
    model = linear()
    assert kc.load(model, tmp_path) is None
    kc.save(model, tmp_path, step=3)
    assert kc.load(model, tmp_path) == (3, None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", ONE_AND_TWO)
def test_a_loop_of_ones_own(tmp_path, devices):
    def trained(stop):
        keras.utils.set_random_seed(7)
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((5,)), layers.Dropout(0.5), layers.Dense(1)]
        )
        if devices:
            kc.replicate(model, devices)
        model.compile("adam", "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        loaded = kc.load(model, tmp_path)
        state = loaded.state if loaded else {"step": 0, "drawn": []}
        for step in range(state["step"], stop):
            rows = np.random.permutation(SAMPLES)[:BATCH]
            state["drawn"].append(rows)
            model.train_on_batch(X[rows], Y[rows])
            state["step"] = step + 1
            kc.save(model, tmp_path, step=step + 1, state=state)
        return [*model.get_weights(), *state["drawn"]]

    for stop in (2, 3):
        trained(stop)
    resumed = trained(5)
    for each in kc.checkpoints(tmp_path):
        shutil.rmtree(each.path)
    for one, other in zip(resumed, trained(5), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(TypeError, match="no plain value"):
        kc.save(linear(), tmp_path, step=9, state=object())
    linear(kc.Resume(tmp_path / "of fit"))
    with pytest.raises(ValueError, match="saved by `Resume`"):
        kc.load(linear(), tmp_path / "of fit")
    with pytest.raises(ValueError, match=r"saved by `kc\.save`"):
        linear(kc.Resume(tmp_path))
    with pytest.warns(kc.ConfluxWarning, match="no optimizer is saved"):
        kc.save(keras.Sequential(), tmp_path / "of weights", step=1)


FIRST_USE = """
import sys
import keras
import keras_conflux as kc
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
given = keras.ops.ones((4, 2)), keras.ops.ones((4, 1))
model.fit(*given, shuffle=False, callbacks=[kc.Resume(sys.argv[1])])
"""


def test_the_first_use_of_a_process_is_in_the_call_of_fit(tmp_path):
    """Python looks up `fit` before it makes the callback."""
    result = forked.run("-c", FIRST_USE, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert kc.checkpoints(tmp_path)


def test_what_load_refuses(tmp_path):
    kc.save(linear(optimizer="adam"), tmp_path, step=1)
    with pytest.raises(ValueError, match="optimizer Adam, which is RMSprop"):
        kc.load(linear(optimizer="rmsprop"), tmp_path)
    with pytest.raises(ValueError, match="Of the weights"):
        kc.load(linear(optimizer="adam", inputs=6), tmp_path)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    with pytest.raises(
        ValueError, match=r"optimizer's variables .*optimizer\.build"
    ):
        kc.load(model, tmp_path)


@several
def test_what_is_not_plain_in_a_state_is_named(tmp_path):
    model, losses = linear(), kc.Replicas([0.1, 0.2], devices=2)
    for name, state in {
        "state": losses,
        r"state\[0\]": (losses, 1),
        r"state\['l'\]\[1\]": {"step": 1, "l": [1, losses]},
    }.items():
        expected = rf"^{name} is no .* a Replicas\..*`float\(losses\[0\]\)`"
        with pytest.raises(TypeError, match=expected):
            kc.save(model, tmp_path, step=1, state=state)
    assert not kc.checkpoints(tmp_path)


def test_another_model_is_not_saved_to_the_same_directory(tmp_path):
    one, other = linear(), linear()
    kc.save(one, tmp_path / "r", step=1)
    (tmp_path / "link").symlink_to(tmp_path / "r")
    expected = rf"{one.name}, to .*/link, .* of {other.name} .* one model that"
    with pytest.raises(ValueError, match=expected):
        kc.save(other, tmp_path / "link", step=2)
    kc.save(one, tmp_path / "r", step=2)
    assert kc.load(other, tmp_path / "r").step == 2
    kc.save(other, tmp_path / "r", step=3)
    del one, other
    kc.save(linear(), tmp_path / "r", step=4)


def test_models_that_are_saved_as_one(tmp_path):
    class Both(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts, self.optimizers = [linear(), linear()], []
            for part in self.parts:
                self.optimizers.append(keras.optimizers.Adam(0.1))
                self.optimizers[-1].build(part.trainable_variables)
            self.built = True

        def values(self):
            held = [*self.parts, *self.optimizers]
            return [v.numpy() for each in held for v in each.variables]

    saved = Both()
    for optimizer, part in zip(saved.optimizers, saved.parts, strict=True):
        optimizer.apply([tf.ones(v.shape) for v in part.trainable_variables])
    kc.save(saved, tmp_path, step=1, state="both")
    loaded = Both()
    assert kc.load(loaded, tmp_path).state == "both"
    for one, other in zip(loaded.values(), saved.values(), strict=True):
        np.testing.assert_array_equal(one, other)
