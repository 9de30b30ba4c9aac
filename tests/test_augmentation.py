"""The rotation of `examples/augmentation.py`, which XLA compiles."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY

import keras_conflux as kc
from examples import augmentation
from examples.benchmarks import augmentation as measured

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 10, 14, 3), "uint8")


@pytest.mark.parametrize("factor", [0.02, 1.0])
def test_images_are_those_of_keras(factor):
    make = keras.layers.RandomRotation, augmentation.Rotation
    wanted, found = (
        layer(factor, seed=1)(IMAGES, training=True) for layer in make
    )
    assert np.abs(wanted - IMAGES).max() > 1
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-3)
    layer = augmentation.Rotation(factor)
    np.testing.assert_array_equal(layer(IMAGES, training=False), IMAGES)


@pytest.mark.long
def test_xla_compiles_it():
    matrices = np.tile([0.9, 0.1, 2, -0.1, 0.9, 1, 0, 0], (12, 1))
    images = tf.cast(IMAGES, tf.float32)
    compiled = tf.function(augmentation.transformed, jit_compile=True)
    np.testing.assert_allclose(
        compiled(images, matrices),
        keras.ops.image.affine_transform(images, matrices, fill_mode="reflect"),
        rtol=1e-5,
        atol=1e-3,
    )


def test_replicas_train_as_one_device():
    def trained(devices):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input(IMAGES.shape[1:]),
                augmentation.Rotation(0.1),
                keras.layers.Conv2D(2, 3),
                keras.layers.GlobalMaxPooling2D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
        if devices:
            kc.replicate(model, devices)
        images = IMAGES / 255
        model.fit(
            images, images[:, 0, 0, :1], batch_size=12, epochs=3, verbose=0
        )
        return model.get_weights()

    for one, many in zip(trained(None), trained(MANY), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_example_runs(capsys):
    augmentation.main()
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.long
def test_layers_are_timed(capsys, monkeypatch):
    monkeypatch.setattr(measured, "_SIZE", 8)
    measured.main(["Rotation", "--batch", "2", "--steps", "2", "--epochs", "1"])
    assert '"layer": "Rotation"' in capsys.readouterr().out
