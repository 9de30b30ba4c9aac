"""Arrays that are shuffled in another order in each epoch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from models import assert_same_training
from test_resume import Kill
from test_resume import Killed

import keras_conflux as kc
from keras_conflux._extensions.resume import fit as resumed_fit
from keras_conflux._fit.input.epoch_iterator import reshuffling

pytestmark = pytest.mark.usefixtures("deterministic")
COUNT, SIZE = 22, 4  # the last batch has two samples
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype("float32")
Y = X.sum(1, keepdims=True) ** 2


def orders(epochs=4, size=SIZE, seed=7):
    """Returns the samples' numbers in each epoch of a data set."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    rows = np.arange(COUNT)
    adapter = ArrayDataAdapter(rows, batch_size=size, shuffle=True)
    with reshuffling(True):
        dataset = adapter.get_tf_dataset()
    sizes = {len(batch) for batch in dataset.take(COUNT // size)}
    assert sizes == {size}
    return [np.concatenate([batch for batch in dataset]) for _ in range(epochs)]


@pytest.mark.parametrize("size", [1, SIZE, 11, COUNT])
def test_each_epoch_has_an_order_of_its_own(size):
    found = orders(size=size)
    for order in found:
        np.testing.assert_array_equal(np.sort(order), np.arange(COUNT))
    assert len({tuple(order) for order in found}) == len(found)


@pytest.mark.long
def test_orders_follow_from_the_seed():
    first = orders()
    again = orders()
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, orders(seed=8))
    # Another data set, as of the next `fit`, is shuffled otherwise.
    assert not np.array_equal(orders(), orders(seed=None))


@pytest.mark.long
def test_every_place_has_every_sample_equally_often():
    rounds = 600
    found = np.array(orders(epochs=rounds))
    counts = np.array([np.bincount(x, minlength=COUNT) for x in found.T])
    expected = rounds / COUNT
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    # Its mean is 21 * 21 = 441 and its standard deviation about 30.
    assert chi_squared < 441 + 5 * 30


def test_whole_batches_have_a_known_size():
    with reshuffling(True):
        adapter = ArrayDataAdapter(X, batch_size=11, shuffle=True)
        even = adapter.get_tf_dataset().element_spec
        adapter = ArrayDataAdapter(X, batch_size=4, shuffle=True)
        uneven = adapter.get_tf_dataset().element_spec
    assert even.shape == (11, 3)
    assert uneven.shape.as_list() == [None, 3]


def test_arrays_of_all_kinds():
    sparse = tf.sparse.from_dense(np.eye(COUNT, dtype="float32"))
    x = {"a": X, "b": [tf.constant(X[:, 0]), np.arange(COUNT)], "c": sparse}
    options = {"batch_size": SIZE, "shuffle": True}
    adapter = ArrayDataAdapter(x, Y, np.arange(COUNT), **options)
    with reshuffling(True):
        dataset = adapter.get_tf_dataset()
    expected = adapter.get_tf_dataset().element_spec
    assert keras.tree.map_structure(
        lambda spec: spec.dtype, dataset.element_spec
    ) == keras.tree.map_structure(lambda spec: spec.dtype, expected)
    for inputs, targets, rows in dataset:
        np.testing.assert_array_equal(inputs["a"], X[rows])
        np.testing.assert_array_equal(inputs["b"][0], X[rows, 0])
        np.testing.assert_array_equal(inputs["b"][1], rows)
        dense = tf.sparse.to_dense(tf.sparse.reorder(inputs["c"]))
        np.testing.assert_array_equal(dense, np.eye(COUNT)[rows])
        np.testing.assert_array_equal(targets, Y[rows])


@pytest.mark.parametrize("shuffle", [False, "batch"])
def test_other_orders_are_those_of_keras(shuffle):
    def drawn(wanted):
        keras.utils.set_random_seed(7)
        adapter = ArrayDataAdapter(X, batch_size=SIZE, shuffle=shuffle)
        with reshuffling(wanted):
            return [batch for batch in adapter.get_tf_dataset()]

    for one, other in zip(drawn(True), drawn(False), strict=True):
        np.testing.assert_array_equal(one, other)


def train(devices, reshuffle, folder=None, after=None, epochs=3, **options):
    """Runs the script of a user once."""
    resumed_fit.ended_here.clear()  # as in a process of its own
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    if devices:
        kc.replicate(model, devices, reshuffle=reshuffle)
    callbacks = [Kill(after)]
    if folder is not None:
        callbacks.append(kc.Resume(folder, every=1))
    with reshuffling(reshuffle and not devices):  # for plain Keras
        history = model.fit(
            *(X, Y, SIZE, epochs),
            callbacks=callbacks,
            verbose=0,
            **options,
        )
    return model, history


OPTIONS = {
    "plain": {},
    "weights": {"sample_weight": np.linspace(0, 1, COUNT)},
    "a part for validation": {"validation_split": 0.3},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_replicas_train_on_the_orders_of_one_device(count, name):
    one, one_history = train(None, True, **OPTIONS[name])
    many, history = train(count, True, **OPTIONS[name])
    assert_same_training(one, many, one_history, history)


@pytest.mark.long
def test_without_the_switch_orders_are_those_of_keras():
    one, one_history = train(None, False)
    many, history = train(MANY, None)
    assert_same_training(one, many, one_history, history)
    other, _ = train(MANY, True)
    gaps = [
        np.abs(a - b).max()
        for a, b in zip(many.get_weights(), other.get_weights(), strict=True)
    ]
    assert max(gaps) > 1e-3


@pytest.mark.long
def test_an_interrupted_training_goes_on_in_its_order(tmp_path):
    expected = train(MANY, True)
    for after in (2, 9, 5):  # steps, of six an epoch
        with pytest.raises(Killed):
            train(MANY, True, tmp_path, after)
    got = train(MANY, True, tmp_path)
    for one, other in zip(
        expected[0].get_weights(), got[0].get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert expected[1].history == got[1].history


def drawn_by(model):
    """Whether `fit` of a model draws another order in its second epoch."""
    losses = []
    # Nothing is trained, so the loss of a first batch tells its samples.
    keras.utils.set_random_seed(7)
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    model.fit(X, Y, SIZE, 2, callbacks=[First(losses)], verbose=0)
    return losses[0] != losses[1]


class First(keras.callbacks.Callback):
    """Keeps the loss of the first batch of each epoch."""

    def __init__(self, losses):
        super().__init__()
        self._losses = losses

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self._losses.append(logs["loss"])


def dense():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


@pytest.mark.long
def test_the_switch_is_kept_until_it_is_turned():
    model = kc.replicate(dense(), MANY)
    assert not drawn_by(model)
    kc.replicate(model, reshuffle=True)
    assert drawn_by(model)
    kc.replicate(model, MANY)
    assert drawn_by(model)
    kc.replicate(model, reshuffle=False)
    assert not drawn_by(model)
    kc.replicate([model], reshuffle=True)
    assert drawn_by(model)
    kc.unreplicate(model)
    assert not drawn_by(model)
    assert not drawn_by(kc.replicate(model, MANY))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="Received: reshuffle='yes'"):
        kc.replicate(dense(), reshuffle="yes")
    with pytest.raises(TypeError, match="no meaning for: ndarray"):
        kc.replicate(X, reshuffle=True)
    with pytest.raises(TypeError, match="no meaning for: NoneType"):
        kc.replicate(reshuffle=True)
