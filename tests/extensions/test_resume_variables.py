"""Variables that Keras does not track go on in a training that is resumed."""

import collections
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ONE_AND_TWO

import keras_conflux as kc
from keras_conflux._extensions.resume import fit as resumed_fit

SCALE = types.ModuleType("scale")
X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
pytestmark = pytest.mark.usefixtures("deterministic")


class Killed(Exception):
    """Ends a training, as a signal that nobody handles would."""


class Kill(keras.callbacks.Callback):
    """Ends the training after so many steps."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.after:
            raise Killed


class Annealed(keras.Regularizer):
    """Weighs less with each step."""

    def __init__(self, variable):
        self.variable = variable

    def __call__(self, weights):
        return annealed(self.variable) * keras.ops.sum(weights**2)


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("variable",)


def annealed(variable):
    variable.assign(variable * 0.8)
    return keras.ops.convert_to_tensor(variable)


def squares(true, predicted):
    return keras.ops.mean((true - predicted) ** 2, -1)


def of_a_cell(variable):
    def loss(true, predicted):
        return annealed(variable) * squares(true, predicted)

    return loss


def of_an_object(variable):
    held = Slots()
    held.variable = variable

    def loss(true, predicted):
        return annealed(held.variable) * squares(true, predicted)

    return tf.function(loss)


def of_a_module(true, predicted):
    return annealed(SCALE.variable) * squares(true, predicted)


def of_a_dictionary(variable):
    scales = {"of the loss": types.SimpleNamespace(scale=variable)}

    class Loss(keras.Loss):
        def call(self, true, predicted):
            own = annealed(scales["of the loss"].scale)
            return own * squares(true, predicted)

    return Loss()


def of_a_default(variable):
    def loss(true, predicted, scale=variable):
        return annealed(scale) * squares(true, predicted)

    return loss


def of_a_class(variable):
    class Scale:
        @staticmethod
        def now(held=(collections.deque([variable]),)):
            return annealed(held[0][0])

    def loss(true, predicted):
        def own():
            return Scale.now()

        return own() * squares(true, predicted)

    return loss


def of_a_set(variable):
    scales = {Slots()}
    for each in scales:
        each.variable = variable

    def loss(true, predicted):
        return annealed(*(x.variable for x in scales)) * squares(
            true, predicted
        )

    return loss


def of_a_table(_):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def loss(true, predicted):
        key = tf.constant([1], tf.int64)
        table.insert(key, table.lookup(key) + 1.0)
        return squares(true, predicted)

    return loss


LOSSES = {
    "a regularizer": lambda _: "mse",
    "a cell": of_a_cell,
    "an object": of_an_object,
    "a dictionary": of_a_dictionary,
    "a module": lambda _: of_a_module,
    "a default": of_a_default,
    "a class": of_a_class,
}
LOST = {"a set": of_a_set, "a table": of_a_table}


def trained(folder, holder, devices, *callbacks, kind=keras.Variable):
    resumed_fit.ended_here.clear()  # as in a process of its own
    keras.utils.set_random_seed(7)
    SCALE.variable = variable = kind(1.0, name="scale", trainable=False)
    of_weights = Annealed(variable) if holder == "a regularizer" else None
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, kernel_regularizer=of_weights),
        ]
    )
    model.compile("sgd", (LOSSES | LOST)[holder](variable), jit_compile=False)
    if devices:
        kc.replicate(model, devices)
    model.fit(
        *(X, X[:, :2]),
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[kc.Resume(folder, every=1), *callbacks],
    )
    return [*model.get_weights(), variable.numpy()]


@pytest.mark.parametrize("devices", ONE_AND_TWO)
@pytest.mark.parametrize("holder", LOSSES)
def test_an_untracked_variable_goes_on(tmp_path, holder, devices):
    expected = trained(tmp_path / "whole", holder, devices, Kill(None))
    with pytest.raises(Killed):
        trained(tmp_path / "killed", holder, devices, Kill(2))
    got = trained(tmp_path / "killed", holder, devices, Kill(None))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert expected[-1] < 0.5


def test_a_variable_of_tensorflow_goes_on(tmp_path):
    kind = tf.Variable
    expected = trained(
        tmp_path / "whole", "a cell", None, Kill(None), kind=kind
    )
    with pytest.raises(Killed):
        trained(tmp_path / "killed", "a cell", None, Kill(2), kind=kind)
    got = trained(tmp_path / "killed", "a cell", None, Kill(None), kind=kind)
    assert np.array_equal(got[-1], expected[-1])


@pytest.mark.parametrize("devices", ONE_AND_TWO)
def test_a_variable_that_nothing_holds_is_named(tmp_path, devices):
    with pytest.warns(kc.ConfluxWarning, match="first step: scale") as told:
        trained(tmp_path, "a set", devices)
    assert len(told) == 1


def test_a_table_is_named(tmp_path):
    named = "what LookupTableInsertV2 changes"
    with pytest.warns(kc.ConfluxWarning, match=named):
        trained(tmp_path, "a table", None)


def test_a_loop_saves_an_untracked_variable(tmp_path):
    variable = keras.Variable(1.0, trainable=False)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", of_a_cell(variable))
    model.optimizer.build(model.trainable_variables)
    variable.assign(0.25)
    kc.save(model, tmp_path, step=1)
    variable.assign(1.0)
    kc.load(model, tmp_path)
    assert float(variable) == 0.25


def of_names(names, folder, *callbacks):
    resumed_fit.ended_here.clear()
    keras.utils.clear_session()
    held = {x: keras.Variable(0.0, name=x, trainable=False) for x in names}

    def loss(true, predicted):
        for name, variable in held.items():
            variable.assign_add(float(ord(name)))
        return squares(true, predicted)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    resume = kc.Resume(folder, every=1)
    data = X, X[:, :2]
    model.fit(*data, batch_size=4, verbose=0, callbacks=[resume, *callbacks])
    return {name: float(variable) for name, variable in held.items()}


def test_names_tell_variables_apart(tmp_path):
    with pytest.raises(Killed):
        of_names("abc", tmp_path, Kill(2))
    got = of_names("cab", tmp_path, Kill(None))
    assert got == {name: 3.0 * ord(name) for name in "abc"}


class Scored(keras.Model):
    """Builds a metric in its first step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 3))
        self.f1 = keras.metrics.F1Score(threshold=0.5)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.f1.update_state(data[1] > 0, self(data[0]))
        return super().train_step(data)


def test_what_the_first_step_makes_is_named(tmp_path):
    model = Scored()
    model.compile("sgd", "mse")
    resume = kc.Resume(tmp_path, every=1)
    with pytest.warns(kc.ConfluxWarning, match="f1_score/true_positives"):
        model.fit(X, X[:, :2], batch_size=4, verbose=0, callbacks=[resume])
