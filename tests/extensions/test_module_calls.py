"""Layers that call XLA modules, as fused attention does on GPUs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from keras import layers

import keras_conflux as kc
from keras_conflux._compat import tensorflow_xla

X = np.random.default_rng(0).normal(size=(16, 12)).astype("float32")

pytestmark = [
    pytest.mark.skipif(
        not tensorflow_xla.has_module_calls(), reason="needs TensorFlow 2.21"
    ),
    # What a module mixes is known of those of fused attention alone.
    pytest.mark.filterwarnings("ignore::keras_conflux.ConfluxWarning"),
]


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(tensorflow_xla, "_PLATFORM", "CPU")


def _called(operation, x):
    kind = f"tensor<{x.shape[0]}x{x.shape[1]}xf32>"
    text = f"""module {{ func.func @main(%0: {kind}) -> {kind} {{
        %1 = "stablehlo.{operation}"(%0) : ({kind}) -> {kind}
        return %1 : {kind} }} }}"""
    return tensorflow_xla.module_call(text, [x], [x.shape], [x.dtype])[0]


class Tanh(layers.Layer):
    """By a module of one shape."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def call(self, x):
        if x.shape[0] is None:
            x = tf.ensure_shape(x, [self.rows, None])

        @tf.custom_gradient
        def tanh(x):
            def gradient(dy):
                return dy * (1 - tf.square(_called("tanh", x)))

            return _called("tanh", x), gradient

        return tanh(x)

    def compute_output_shape(self, shape):
        return shape


def trained(tanh, scope=None, devices=1, **options):
    rows = len(X) // devices // options.get("microbatches", 1)
    keras.utils.set_random_seed(1)
    with keras.RematScope(scope):
        model = keras.Sequential(
            [
                layers.Input((12,)),
                layers.Dense(12),
                tanh(rows),
                # Turns exchange here, and run what is before it again.
                layers.BatchNormalization(synchronized=True),
                layers.Dense(12),
            ]
        )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    kc.replicate(model, devices, **options)
    model.fit(X, X, batch_size=16, epochs=2, verbose=0)
    return model.get_weights()


class OfTensorFlow(Tanh):
    def call(self, x):
        return tf.tanh(x)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"scope": "full"},
        {"devices": 2, "microbatches": 2},
        {"devices": 2, "microbatches": 2, "scope": "full"},
    ],
    ids=str,
)
def test_a_module_is_run_as_often_as_needed(options):
    if options.get("devices", 1) > MANY:
        pytest.skip("needs two devices")
    wanted = trained(OfTensorFlow)
    for got, value in zip(trained(Tanh, **options), wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)
