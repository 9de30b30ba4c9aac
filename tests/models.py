"""Small models and data, and how a run is compared with one device."""

import keras
import numpy as np


def regression(samples: int = 61) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs of shape (samples, 8) and targets (samples, 1)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, 8)).astype("float32")
    return x, (x[:, :1] * 2 + np.sin(x[:, 1:2])).astype("float32")


def dense(optimizer="adam", **compile_options) -> keras.Model:
    """Makes a compiled two-layer model, always with the same weights."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.Dense(1),
        ]
    )
    options = {"loss": "mse", "metrics": ["mae"], "jit_compile": False}
    options |= compile_options
    model.compile(optimizer=optimizer, **options)
    return model


class Keeps(keras.layers.Layer):
    """Keeps something of its data in `kept`, and returns the data.

    Args:
        update: Called in training with `kept` and the data.
        trainable_kept: Whether an optimizer would train it.
        look: Whether what is returned has `kept` added, as it was `"before"`
            the update or `"after"`.
    """

    def __init__(self, update, trainable_kept=False, look=None):
        super().__init__()
        self.update, self.look = update, look
        self.trainable_kept = trainable_kept

    def build(self, shape):
        self.kept = self.add_weight(
            shape=shape[1:],
            initializer="ones",
            trainable=self.trainable_kept,
        )

    def call(self, x, training=False):
        if training is False:
            return x
        y = x + self.kept if self.look == "before" else x
        self.update(self.kept, x)
        return x + self.kept if self.look == "after" else y


def weights(model: keras.Model) -> np.ndarray:
    """Returns all weights as one vector."""
    return np.concatenate([w.ravel() for w in model.get_weights()])


def state(model: keras.Model) -> list[np.ndarray]:
    """Returns weights and the state of its optimizer, if it has one."""
    optimizer = getattr(model, "optimizer", None)
    variables = optimizer.variables if optimizer is not None else []
    return [v.numpy() for v in [*model.weights, *variables]]


def assert_same_training(one, many, one_logs=None, many_logs=None, rtol=1e-5):
    """Weights, optimizer state and shown logs agree with one device.

    The tolerance is relative to the size of each tensor's largest entry, as
    sums of other order differ by roundings of the largest terms.
    """
    for expected, got in zip(state(one), state(many), strict=True):
        scale = max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * scale)
    if one_logs is not None:
        assert one_logs.history.keys() == many_logs.history.keys()
        for name, expected in one_logs.history.items():
            np.testing.assert_allclose(
                many_logs.history[name],
                expected,
                rtol=rtol,
                atol=1e-6,
                err_msg=name,
            )
