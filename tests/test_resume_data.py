"""The data of a training that is interrupted is found again."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from resume_cases import BATCH
from resume_cases import STEPS
from resume_cases import X
from resume_cases import Y
from test_resume import Kill
from test_resume import Killed

import keras_conflux as kc

pytestmark = pytest.mark.usefixtures("deterministic")
SAMPLES = tf.data.Dataset.from_tensor_slices((X, Y))


def train(data, folder=None, after=None, devices=None, epochs=3, **options):
    """Runs the script of a user once; returns what it ends with.

    Args:
        data: Makes the arguments of `fit` that are the data.
        folder: Of checkpoints, if there are to be any.
        after: The training is killed after so many steps.
        devices: How many replicas there are, if any.
        epochs: How many there are.
        options: Of `fit`.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    if devices:
        kc.replicate(model, devices)
    model.compile("adam", "mse", jit_compile=False)
    callbacks = [Kill(after)]
    if folder is not None:
        callbacks.append(kc.Resume(folder, every=1))
    history = model.fit(
        **data(), epochs=epochs, callbacks=callbacks, verbose=0, **options
    )
    return [*model.get_weights(), *history.history.values()]


def assert_goes_on(folder, data, after=STEPS + 3, **options):
    """Asserts that a training that is killed ends as one that is not."""
    expected = train(data, **options)
    with pytest.raises(Killed):
        train(data, folder, after, **options)
    for one, other in zip(
        train(data, folder, **options), expected, strict=True
    ):
        np.testing.assert_array_equal(one, other)


def generated():
    def samples():
        for row in np.random.permutation(len(X)):
            yield X[row] + np.random.normal(size=5), Y[row]

    spec = tf.TensorSpec((5,)), tf.TensorSpec((1,))
    data = tf.data.Dataset.from_generator(samples, output_signature=spec)
    return {"x": data.batch(BATCH).prefetch(2)}


def noisy():
    def noise(x):
        return x + np.random.normal(size=x.shape).astype("float32")

    def with_noise(x, y):
        return tf.ensure_shape(tf.numpy_function(noise, [x], x.dtype), [5]), y

    return {"x": SAMPLES.map(with_noise).batch(BATCH).prefetch(2)}


@pytest.mark.parametrize("devices", [None, 2])
@pytest.mark.parametrize("data", [generated, noisy])
def test_python_code_in_tf_data_draws_random_numbers(tmp_path, data, devices):
    assert_goes_on(tmp_path, data, devices=devices)
