"""The end of the data ends an epoch, and nothing else does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from models import dense
from models import regression

import keras_conflux as kc
from keras_conflux._compat import keras_iterators
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux._fit.input import batch_sharder

X, Y = regression(45)
METHODS = "fit", "evaluate", "predict"
EPOCHS = 300 if ON_GPU else 20
FOREIGN = (
    "Read less bytes than requested",
    "{{function_node __wrapped__ConcatV2}} End of sequence [Op:ConcatV2]",
)
"""Messages of such errors. The second is that of another thread's iterator."""


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def batches_of_unknown_number() -> tf.data.Dataset:
    return batches().filter(lambda x, y: True)


def all_of(iterator):
    """Yields what an iterator has until it comes to its end."""
    while True:
        try:
            element = keras_iterators.next_of(iterator)
        except StopIteration:
            return
        yield element


def leaves_of(element):
    """Returns the tensors that an element is made of."""

    def opened(leaf):
        optional = isinstance(leaf, tf.experimental.Optional)
        return leaf.get_value() if optional else leaf

    opened_element = tf.nest.map_structure(opened, element)
    return tf.nest.flatten(opened_element, expand_composites=True)


def fails(monkeypatch, owner, name, after, text):
    """Makes calls of a function raise what ends an epoch in Keras' loops."""
    original, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(name)
        if len(calls) > after:
            raise tf.errors.OutOfRangeError(None, None, text)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.range(3),
        tf.data.Dataset.from_tensor_slices({"a": X[:3], "b": (Y[:3], X[:3])}),
        tf.data.Dataset.from_tensors((X, None, ["text"])).repeat(2),
        tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]])),
        tf.data.Dataset.from_tensors(tf.sparse.from_dense([[0, 1], [2, 0]])),
        tf.data.Dataset.from_tensors(tf.experimental.Optional.from_value(1)),
        tf.data.Dataset.from_generator(
            lambda: iter("ab"), output_signature=tf.TensorSpec((), tf.string)
        ),
        tf.data.Dataset.range(0),
    ],
    ids=str,
)
def test_what_is_drawn_is_what_next_draws(dataset):
    drawn = list(all_of(iter(dataset)))
    expected = list(dataset)
    assert len(drawn) == len(expected)
    for one, other in zip(expected, drawn, strict=True):
        tf.nest.assert_same_structure(one, other, expand_composites=True)
        for leaf, same in zip(leaves_of(one), leaves_of(other), strict=True):
            np.testing.assert_array_equal(leaf, same)


def test_errors_of_the_data_are_raised():
    dataset = tf.data.Dataset.from_tensors(1.0).map(
        lambda x: tf.debugging.check_numerics(x / 0, "broken")
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="broken"):
        keras_iterators.next_of(iter(dataset))


@pytest.fixture
def data_without_errors(monkeypatch):
    """Data that fail if TensorFlow is asked for more than there is."""
    data = batches_of_unknown_number()

    def draw(_):
        raise AssertionError("the end would be an error to TensorFlow")

    monkeypatch.setattr(type(iter(data)), "__next__", draw)
    return data


@pytest.mark.parametrize("method", METHODS)
def test_the_end_is_no_error_to_tensorflow(data_without_errors, method):
    """On GPUs, operations of other threads would raise it, too."""
    model = kc.replicate(dense("sgd"), MANY)
    result = getattr(model, method)(data_without_errors, verbose=0)
    steps = {"fit": 6}.get(method, 0)
    assert int(model.optimizer.iterations) == steps
    assert method != "predict" or len(result) == 45


def test_the_end_of_what_is_prefetched_is_no_error(data_without_errors):
    assert len(list(kc.prefetch(data_without_errors, 0))) == 6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize("method", METHODS)
def test_a_callback_that_fails_is_not_the_end(method, text):
    def fail(batch, logs=None):
        raise tf.errors.OutOfRangeError(None, None, text)

    callback = keras.callbacks.LambdaCallback()
    for name in ("train", "test", "predict"):
        setattr(callback, f"on_{name}_batch_end", fail)
    model = kc.replicate(dense(), MANY)
    with pytest.raises(tf.errors.InternalError, match="has failed: "):
        getattr(model, method)(batches(), callbacks=[callback], verbose=0)


def test_a_plain_model_keeps_what_keras_does():
    model = dense("sgd")

    def fail(batch, logs=None):
        raise tf.errors.OutOfRangeError(None, None, FOREIGN[0])

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    model.fit(batches(), callbacks=[callback], verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_every_epoch_is_whole(jit_compile):
    """Epochs are short, so that their ends often come while others work."""
    count = 1 if jit_compile and not ON_GPU else MANY
    model = kc.replicate(dense("sgd", jit_compile=jit_compile), count)
    steps = []
    count_steps = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: steps.append(int(model.optimizer.iterations))
    )
    model.fit(
        batches_of_unknown_number(),
        epochs=EPOCHS,
        callbacks=[count_steps],
        verbose=0,
    )
    assert steps == [6 * (epoch + 1) for epoch in range(EPOCHS)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize("method", METHODS)
def test_a_draw_that_fails_is_not_the_end(monkeypatch, method, text):
    model = kc.replicate(dense(), MANY)
    fails(monkeypatch, keras_iterators, "next_of", 2, text)
    with pytest.raises(tf.errors.InternalError, match="a batch of sequential"):
        getattr(model, method)(batches(), verbose=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_fails_is_not_the_end(monkeypatch, method, text):
    model = kc.replicate(dense("adam", jit_compile=True), 1)
    fails(monkeypatch, XlaProgram, "__call__", 1, text)
    with pytest.raises(tf.errors.InternalError) as caught:
        getattr(model, method)(batches(), verbose=0)
    assert text.split("}} ")[-1] in str(caught.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize("method", METHODS)
def test_a_move_that_fails_is_not_the_end(monkeypatch, method, text):
    model = kc.replicate(dense(), MANY)
    module = batch_sharder.host_to_device
    fails(monkeypatch, module, "moved", 0, text)
    fails(monkeypatch, module, "move_stacked", 1, text)
    with pytest.raises(tf.errors.InternalError, match="a batch of sequential"):
        getattr(model, method)(batches(), verbose=0)


def test_an_iterator_of_a_step_that_comes_to_its_end():
    class Drawing(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")
            self.source = iter(tf.data.Dataset.from_tensor_slices(X[:3]))

        def call(self, x):
            return self.dense(x + next(self.source))

    one, many = Drawing(), kc.replicate(Drawing(), 1)
    for model in (one, many):
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    # The fourth step may count its samples, but trains nothing.
    for expected, got in zip(
        one.get_weights(), many.get_weights(), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
