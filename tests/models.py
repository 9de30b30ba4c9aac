"""Small models and data, and how a run is compared with one device."""

import functools
import os
from collections.abc import Callable
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

COMPILED = os.environ.get("CONFLUX_TEST_COMPILED") == "1"
"""Whether models are compiled by XLA; replicas on CPUs cannot be."""
MARGIN = 4
"""By so many times what a rounding moves on one device, replicas may differ:
they round each step's sums otherwise, not the start alone."""


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
    options = {"loss": "mse", "metrics": ["mae"], "jit_compile": COMPILED}
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


def outcome(
    model: keras.Model,
    history: keras.callbacks.History | None = None,
    batches: Sequence[dict] = (),
) -> dict[str, np.ndarray]:
    """Returns all that a training leaves: each tensor and number by a name.

    Args:
        model: The trained model. Its weights are taken, and what its
            optimizers keep.
        history: What `fit` returned.
        batches: The logs that a callback got at each batch.
    """
    held = vars(model).values()
    owners = [v for v in held if isinstance(v, keras.optimizers.Optimizer)]
    variables = list(model.weights)
    for owner in owners:
        variables.extend(owner.variables)
    found = {
        f"{position} {variable.path}": variable.numpy()
        for position, variable in enumerate(variables)
    }
    logs = history.history if history is not None else {}
    for name, values in logs.items():
        for epoch, value in enumerate(values):
            found[f"{name} of epoch {epoch}"] = np.asarray(value)
    for position, batch in enumerate(batches):
        for name, value in batch.items():
            found[f"{name} of batch {position}"] = np.asarray(value)
    return found


def gaps(
    expected: dict[str, np.ndarray], got: dict[str, np.ndarray]
) -> dict[str, float]:
    """Returns the largest absolute difference of each tensor of outcomes."""
    found = {}
    for name, (old, new) in _paired(expected, got).items():
        equal = (old == new) | (np.isnan(old) & np.isnan(new))
        with np.errstate(invalid="ignore"):
            gap = np.where(equal, 0, np.abs(new - old))
        found[name] = float(np.max(gap, initial=0))
    return found


def _paired(
    expected: dict[str, np.ndarray], got: dict[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs variables by position, as paths number models, and logs by name."""
    pairs = {}
    for (name, old), (other, new) in zip(
        expected.items(), got.items(), strict=True
    ):
        label, other_label = (
            each.split()[0] if each[0].isdigit() else each
            for each in (name, other)
        )
        assert label == other_label
        assert old.shape == new.shape, name
        pairs[name] = np.float64(old), np.float64(new)
    return pairs


def size(value: np.ndarray) -> float:
    """Returns the largest finite entry of a tensor, without its sign."""
    value = np.abs(np.float64(value))
    return float(np.max(value, initial=0, where=np.isfinite(value)))


def assert_same_outcome(
    expected: dict[str, np.ndarray],
    got: dict[str, np.ndarray],
    rtol: float = 1e-5,
    roundings: Callable[[], dict[str, float]] | None = None,
) -> None:
    """Each tensor agrees with one device, relative to its own largest entry.

    Sums of another order differ by roundings of the largest terms, so entries
    of a tensor share a tolerance and tensors do not. Integers are equal.

    Args:
        expected: The outcome on one device.
        got: The outcome to compare.
        rtol: The tolerance of a tensor, relative to its largest entry.
        roundings: Called if a tensor differs by more. Returns how far one
            rounding of what a training starts from moves each tensor on one
            device; a tensor may differ by `MARGIN` times that.
    """
    tolerances = {
        name: rtol * size(value) if value.dtype.kind not in "biu" else 0.0
        for name, value in expected.items()
    }
    found = gaps(expected, got)
    wrong = [name for name in found if not found[name] <= tolerances[name]]
    moved = roundings() if wrong and roundings else {}
    pairs = _paired(expected, got)
    for name in wrong:
        old, new = pairs[name]
        np.testing.assert_allclose(
            new,
            old,
            rtol=0,
            atol=max(tolerances[name], MARGIN * moved.get(name, 0)),
            err_msg=f"{name}, moved by {moved.get(name)} by a rounding",
        )


def assert_same_training(one, many, one_logs=None, many_logs=None, rtol=1e-5):
    """Weights, optimizer state and shown logs agree with one device.

    See `assert_same_outcome` for how exactly.
    """
    assert_same_outcome(outcome(one, one_logs), outcome(many, many_logs), rtol)


def moved_by_roundings(
    expected: dict[str, np.ndarray],
    train: Callable[[Callable[[keras.Model], None]], dict[str, np.ndarray]],
) -> dict[str, float]:
    """Returns how far one rounding of its start moves what a training leaves.

    Args:
        expected: The outcome of a training on one device.
        train: Trains there again. It is called with a function that is to be
            called with the model before `fit`, and returns the outcome.

    Returns:
        By name, the largest of three trainings.
    """
    moved = [
        gaps(expected, train(functools.partial(round_otherwise, seed=seed)))
        for seed in range(3)
    ]
    return {name: max(each[name] for each in moved) for name in expected}


def round_otherwise(model: keras.Model, seed: int) -> None:
    """Moves what a model trains from by one rounding, up or down.

    Now each float of its trainable weights, and in each step each float of the
    inputs. A rounding leaves zeros what they are.
    """
    rng = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        value = weight.numpy()
        to = np.where(rng.random(value.shape) < 0.5, np.inf, -np.inf)
        moved = np.nextafter(value, to.astype(value.dtype))
        weight.assign(np.where(value == 0, value, moved))
    step = model.train_step

    def moved(leaf):
        if not leaf.dtype.is_floating:
            return leaf
        draw = tf.random.stateless_uniform(tf.shape(leaf), [seed, 0])
        signs = tf.cast(tf.where(draw < 0.5, -1.0, 1.0), leaf.dtype)
        return leaf + leaf * signs * np.finfo(leaf.dtype.as_numpy_dtype).eps

    def train_step(data):
        x, *rest = data
        x = tf.nest.map_structure(moved, x, expand_composites=True)
        return step((x, *rest))

    model.train_step = train_step
