"""Gradients of drawn programs, by drawn sources, are those of one device.

A program is a graph of operations on rows and on statistics of the batch. Its
sources are weights and any values on the way: one may be made of another, be a
view of it, or be given twice. Tapes may be nested and persistent. All is in
float64, so that a wrong weight of a replica is no rounding.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import RUN_LONG_TESTS
from conftest import several

import keras_conflux as kc

pytestmark = pytest.mark.usefixtures("in_float64")
X = np.random.default_rng(0).normal(size=(11, 3))  # the last batch is smaller
DRAWS = range(120) if RUN_LONG_TESTS else (*range(4), 29)
"""Number 29 has found a gradient of integers."""

ROWS = {
    "tanh": lambda r, s: tf.tanh(r),
    "scaled": lambda r, s: r * s,
    "shifted": lambda r, s: r + s,
    "centered": lambda r, s: r - tf.reduce_mean(r, 0),
    "softmax": lambda r, s: tf.nn.softmax(r, 0),
    "squared": lambda r, s: 0.3 * r**2,
    "features": lambda r, s: r * tf.reduce_sum(r * s, 1, keepdims=True),
    "turned": lambda r, s: r[:, ::-1],
    "view": lambda r, s: tf.reshape(r, [-1, 3]),
    "the same": lambda r, s: tf.identity(r),
}
STATISTICS = {
    "mean": lambda r, s: tf.reduce_mean(r, 0),
    "sum": lambda r, s: 0.1 * tf.reduce_sum(r, 0),
    "deviation": lambda r, s: tf.math.reduce_std(r, 0),
    "largest": lambda r, s: tf.reduce_max(r, 0),
    "product": lambda r, s: s * tf.reduce_mean(r * r, 0),
    "exp": lambda r, s: tf.exp(-(s**2)),
    "turned": lambda r, s: s[::-1],
    "view": lambda r, s: tf.reshape(s, [3]),
    "twice": lambda r, s: s + s,
}
TARGETS = {
    "mean": lambda r, s: tf.reduce_mean(r * s),
    "sum": lambda r, s: 0.1 * tf.reduce_sum(r * s),
    "ratio": lambda r, s: tf.reduce_sum(r) / (2 + tf.reduce_sum(r**2)),
    "of a mean": lambda r, s: tf.exp(-(tf.reduce_mean(r) ** 2)),
    "of statistics": lambda r, s: tf.reduce_sum(s**2),
    "rows": lambda r, s: tf.reduce_mean(r * s, 1),
}


class Program:
    """A drawn program.

    Args:
        seed: Of what is drawn.
    """

    def __init__(self, seed):
        random = np.random.default_rng(seed)

        def draw(names):
            return [*names][random.integers(len(names))]

        self.parts = []
        for _ in range(random.integers(3, 7)):
            makes_rows = bool(random.integers(2))
            names = ROWS if makes_rows else STATISTICS
            self.parts.append((makes_rows, draw(names), *random.random(2)))
        self.targets = [(draw(TARGETS), *random.random(2)) for _ in range(2)]
        self.sources = random.random(random.integers(1, 5))
        self.is_persistent = bool(random.integers(2))
        self.is_nested = bool(random.integers(2))

    def values(self, x, weights):
        """Returns rows, and statistics with weights."""
        rows, statistics = [x @ weights[0]], [*weights[1:]]
        for makes_rows, name, row, statistic in self.parts:
            names = ROWS if makes_rows else STATISTICS
            made = names[name](_at(rows, row), _at(statistics, statistic))
            (rows if makes_rows else statistics).append(made)
        return rows, statistics

    def gradients(self, x, weights):
        """Returns derivatives by drawn sources."""
        with tf.GradientTape(persistent=self.is_persistent) as tape:
            rows, statistics = self.values(x, weights)
            targets = [
                TARGETS[name](_at(rows, row), _at(statistics, statistic))
                for name, row, statistic in self.targets
            ]
        values = [*rows, *statistics]
        sources = [_at(values, place) for place in self.sources]
        if not self.is_persistent:
            targets = targets[:1]
        found = [
            tape.gradient(each, sources, unconnected_gradients="zero")
            for each in targets
        ]
        return [x for each in found for x in each]

    def step(self, x, weights):
        """Returns derivatives by weights, and numbers of all derivatives."""
        with tf.GradientTape() as tape:
            found = self.gradients(x, weights)
            loss = tf.reduce_mean(tf.tanh(x @ weights[0]) * weights[1])
            if self.is_nested:
                loss += sum(tf.reduce_sum(tf.sin(each)) for each in found)
        slopes = tape.gradient(loss, weights, unconnected_gradients="zero")
        return slopes, [tf.reduce_sum(tf.cos(x) - 1) for x in found]


def _at(values, place):
    return values[int(place * len(values))]


class Drawn(keras.Model):
    def __init__(self, program):
        super().__init__()
        self.program = program
        self.all = [
            self.add_weight(shape=shape, initializer="ones", name=name)
            for name, shape in (("w", (3, 3)), ("a", (3,)), ("b", (3,)))
        ]
        self.built = True

    def train_step(self, data):
        weights = [each.value for each in self.all]
        slopes, numbers = self.program.step(data, weights)
        self.optimizer.apply(slopes, self.all)
        return {f"number {i}": each for i, each in enumerate(numbers)}


def trained(program, count):
    keras.utils.set_random_seed(0)
    model = Drawn(program)
    random = np.random.default_rng(1)
    model.set_weights([random.normal(size=x.shape) for x in model.weights])
    model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    if count:
        kc.replicate(model, count)
    logs = [
        model.fit(X[begin : begin + 6], batch_size=6, shuffle=False, verbose=0)
        for begin in (0, 6)
    ]
    numbers = [x for each in logs for x in each.history.values()]
    return [*numbers, *map(np.asarray, model.weights)]


@pytest.mark.sampled(1)
@several
@pytest.mark.parametrize("seed", DRAWS)
def test_gradients_of_drawn_programs(seed):
    program = Program(seed)
    expected = trained(program, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        found = trained(program, MANY)
    has_warned = any(
        issubclass(each.category, kc.ConfluxWarning) for each in caught
    )
    for one, other in zip(expected, found, strict=True):
        close = np.isclose(other, one, rtol=1e-9, atol=1e-11)
        assert has_warned or close.all(), (seed, one, other)
