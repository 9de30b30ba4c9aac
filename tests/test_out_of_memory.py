"""A batch for which there is no memory is skipped, and training goes on."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import several
from models import dense
from models import regression

import keras_conflux as kc


def on_the_last(value) -> kc.Replicas:
    """Returns `value` for the last replica and zero for the others."""
    return kc.Replicas([tf.zeros_like(value)] * (MANY - 1) + [value], MANY)


def allocate(fails: tf.Tensor) -> tf.Tensor:
    """Returns 1.0, or fails like an op that gets no memory."""

    def run(fails):
        if fails:
            # What TensorFlow says of it; the op itself would wait for 10 s.
            raise MemoryError("OOM when allocating tensor with shape[3]")
        return np.float32(1)

    return tf.ensure_shape(tf.numpy_function(run, [fails], tf.float32), ())


def test_it_is_withdevices_where_memory_suffices(count):
    @kc.skip_out_of_memory(devices=count)
    def run(x, shared):
        for _ in tf.range(2):  # graph code, too
            x += shared
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(kc.Replicas([1.0] * count, count), 10.0)
    assert result.devices == DEVICES[:count]
    assert [float(each) for each in result] == [21.0] * count
    assert run.skipped == 0


def test_a_device_without_memory_skips_the_batch():
    @kc.skip_out_of_memory
    def run(fails, x):
        return allocate(fails) + tf.reduce_sum(x)

    x = np.ones((2, 3), "float32")
    message = (
        rf"run: no memory for a batch of bool\(\), float32\(2, 3\) per device.*"
        rf"OOM when allocating .*replica {MANY - 1} \({DEVICES[MANY - 1]}\)"
    )
    for skipped in (1, 2):
        with pytest.warns(kc.ConfluxWarning, match=message) as caught:
            assert run(on_the_last(tf.constant(True)), x) is None
        assert f"as {skipped} so far" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert run.skipped == skipped
        assert float(run(on_the_last(tf.constant(False)), x)[0]) == 7.0


def test_an_op_that_gets_no_memory():
    @kc.skip_out_of_memory
    def run(size):
        return tf.reduce_sum(tf.sort(tf.fill([size], 0.5)))

    assert float(run(on_the_last(tf.constant(4, tf.int64)))[-1]) == 2.0
    size = on_the_last(tf.constant(1 << 46, tf.int64))
    with pytest.warns(kc.ConfluxWarning, match="no memory"):
        assert run(size) is None


def test_other_errors_are_raised():
    @kc.skip_out_of_memory(devices=MANY)
    def run(x):
        tf.debugging.assert_less(x, 5.0)
        return x

    with pytest.raises(tf.errors.InvalidArgumentError):
        run(7.0)
    assert run.skipped == 0


@several
@pytest.mark.parametrize("step", ["allreduce", "normalization"])
def test_a_collective_is_refused(step):
    layer = kc.replicate(
        lambda: keras.layers.BatchNormalization(synchronized=True), MANY
    )
    layer.build((None, 2))

    @kc.skip_out_of_memory(devices=MANY)
    def run(x):
        if step == "allreduce":
            return kc.allreduce("sum", x)
        return layer(x, training=True)

    with pytest.raises(ValueError, match=r"run makes a collective call"):
        run(kc.replicate(tf.ones((3, 2)), MANY))
    assert float(kc.allreduce("sum", *[1.0] * MANY)[0]) == MANY


@several
@pytest.mark.filterwarnings("ignore:.*copies come apart")  # until `apply`
def test_training_goes_on_as_if_the_batch_had_not_been():
    def make():
        normalization = keras.layers.BatchNormalization()
        model = keras.Sequential(
            [keras.Input((8,)), normalization, *dense().layers]
        )
        model.compile("adam")
        model.optimizer.build(model.trainable_variables)
        return kc.replicate(model, MANY)

    one, other = make(), make()
    x, y = regression(4 * MANY)

    @kc.skip_out_of_memory
    def gradients_of(model, x, y, fails):
        with tf.GradientTape() as tape:
            error = (model(x, training=True) - y) ** 2
            loss = tf.reduce_mean(error) * allocate(fails)
        return tape.gradient(loss, model.trainable_variables)

    @kc.withdevices
    def apply(model, gradients):
        gradients = kc.allreduce("mean", gradients)
        model.optimizer.apply(gradients, model.trainable_variables)
        kc.allreduce("mean", model.non_trainable_variables)

    def train(model, batches):
        for first, fails in batches:
            batch = kc.split((x[first:], y[first:]), MANY)
            fails = on_the_last(tf.constant(fails))
            gradients = gradients_of(model, *batch, fails)
            if gradients is None:
                kc.synchronize(model)
            else:
                apply(model, gradients)
            kc.assert_in_sync(model)

    with pytest.warns(kc.ConfluxWarning, match="no memory"):
        train(one, [(0, False), (MANY, True), (2 * MANY, False)])
    train(other, [(0, False), (2 * MANY, False)])
    # The moving averages of some replicas may have seen the batch.
    for got, expected in zip(
        one.trainable_variables, other.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-6)
