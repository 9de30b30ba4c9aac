"""Variables that something holds without owning them.

Keras tracks a variable as its holder's own, whoever has made it.
"""

import keras
import numpy as np
import pytest
from conftest import MANY
from keras import ops
from models import assert_same_training
from models import regression

import keras_conflux as kc

X, Y = regression(23)
WAYS = {
    "itself": lambda found: found,
    "in a list": lambda found: [found],
    "in a dictionary": lambda found: {"held": found},
    "in a loss": lambda found: HoldingLoss(found),
}


class HoldingLoss(keras.losses.Loss):
    """A loss that holds a variable, and counts it."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, y_true, y_pred):
        scale = 1 + 0.01 * ops.sum(self.held**2)
        return scale * ops.mean((y_true - y_pred) ** 2, -1)


class Monitor(keras.metrics.Metric):
    """Tells the norm of what it holds, and keeps a limit of its own."""

    def __init__(self, held, way):
        super().__init__(name="monitor")
        self.held = WAYS[way](held)
        self.read = held
        self.limit = self.add_variable(
            (), keras.initializers.Constant(0.5), aggregation="mean"
        )
        self.last = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        norm = ops.sqrt(ops.sum(self.read**2))
        self.last.assign(norm + self.limit)

    def reset_state(self):
        self.last.assign(0.0)

    def result(self):
        return self.last + 0.0


class Annealed(keras.constraints.Constraint):
    """A constraint that is narrower with each update."""

    def __init__(self):
        self.limit = keras.Variable(1.0, trainable=False)

    def __call__(self, weights):
        self.limit.assign(self.limit * 0.8)
        return ops.clip(weights, -self.limit, self.limit)


class Counting(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that counts by itself."""

    def __init__(self):
        self.limit = keras.Variable(1.0, trainable=False)

    def __call__(self, step):
        self.limit.assign(self.limit * 0.8)
        return 0.1 * self.limit


def owned_by(model, optimizer):
    return {
        "weight": model.layers[0].kernel,
        "bias": model.layers[1].bias,
        "learning rate": optimizer.learning_rate,
    }


def trained(what, way, count, before):
    keras.utils.set_random_seed(1)
    net = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *net])
    optimizer = keras.optimizers.SGD(0.05)
    if count and before:
        kc.replicate(model, count)
    held = owned_by(model, optimizer)[what]
    loss = HoldingLoss(held) if way == "in a loss" else "mse"
    model.compile(
        optimizer, loss, metrics=[Monitor(held, way)], jit_compile=False
    )
    if count and not before:
        kc.replicate(model, count)
    asked = model.evaluate(X, Y, batch_size=7, verbose=0)
    logs = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    model.train_on_batch(X[:5], Y[:5])
    return model, logs, asked


@pytest.mark.sampled(4)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["weight", "bias", "learning rate"])
def test_what_a_metric_holds_keeps_its_value(what, way, before):
    one, first, asked = trained(what, way, None, before)
    many, second, again = trained(what, way, MANY, before)
    np.testing.assert_allclose(again, asked, rtol=1e-5)
    assert_same_training(one, many, first, second)


@pytest.mark.parametrize("kind", [Annealed, Counting])
def test_what_an_update_writes_is_written_once(kind):
    found = []
    for count in (None, MANY):
        keras.utils.set_random_seed(1)
        held = kind()
        is_limit = kind is Annealed
        of_kernel = {"kernel_constraint": held} if is_limit else {}
        model = keras.Sequential([keras.layers.Dense(1, **of_kernel)])
        model.compile(keras.optimizers.SGD(0.05 if is_limit else held), "mse")
        if count:
            kc.replicate(model, count)
        logs = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)
        found.append((model, logs, float(held.limit)))
    (one, first, limit), (many, second, again) = found
    assert again == pytest.approx(limit)
    assert_same_training(one, many, first, second)
