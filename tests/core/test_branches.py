"""What a step writes in branches, loops and functions, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from keras import ops
from models import COMPILED

import keras_conflux as kc
from keras_conflux._fit.numerics import choices

RNG = np.random.default_rng(5)
X = RNG.normal(size=(31, 8)).astype("float32")
Y = np.tanh(X[:, :2] + 0.3 * RNG.normal(size=(31, 2))).astype("float32")


class Steps(keras.Model):
    """Trains, and then keeps something.

    Args:
        keep: Called with the model, the inputs and their mean squared error.
    """

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.head = keras.layers.Dense(2)
        self.head.build((None, 8))
        self.a, self.b = (
            self.add_weight(name=name, initializer="ones", trainable=False)
            for name in "ab"
        )
        self.stop = self.add_weight(
            name="stop", initializer="zeros", dtype="bool", trainable=False
        )
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x) - y) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.keep(self, x, loss)
        return {"loss": loss}

    def test_step(self, data):
        x, y = data
        loss = ops.mean((self(x) - y) ** 2)
        self.keep(self, x, loss)
        return {"loss": loss}


class Trace(keras.callbacks.Callback):
    """Notes what weights are after each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, batch, logs=None):
        model = self.model
        self.seen.append([float(x) for x in (model.a, model.b, model.stop)])

    on_train_batch_end = on_test_batch_end = note


def outcome(keep, count, **fit):
    """Returns what steps have kept after each batch, and all weights."""
    keras.utils.set_random_seed(3)
    model = Steps(keep)
    model.compile(keras.optimizers.SGD(0.1))
    if count:
        kc.replicate(model, count)
    trace = Trace()
    options = {"batch_size": 9, "callbacks": [trace], "verbose": 0}
    model.fit(X, Y, shuffle=False, epochs=2, **options, **fit)
    model.evaluate(X, Y, **options)
    if count:
        kc.assert_in_sync(model)
    rate = float(model.optimizer.learning_rate)
    numbers = [rate, float(model.mean.result())]
    return np.array(trace.seen), [*model.get_weights(), *numbers]


def assert_as_on_one_device(keep):
    (seen, weights), (one_seen, one_weights) = (
        outcome(keep, count) for count in (MANY, None)
    )
    np.testing.assert_allclose(seen, one_seen, rtol=1e-5, atol=1e-6)
    for many, one in zip(weights, one_weights, strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-6)
    return one_seen


def do(*writes):
    """Makes a branch of functions that write."""

    def branch():
        for write in writes:
            write()
        return 0.0

    return branch


def _doubles_or_halves(model, x, loss):
    tf.cond(
        loss > 1.8,
        lambda: model.a.assign(model.a * 2.0),
        lambda: model.a.assign(model.a / 2.0),
    )


def _counts_large_batches(model, x, loss):
    ops.cond(
        ops.shape(x)[0] > 5,
        lambda: model.a.assign_add(1.0),
        lambda: model.a.assign_add(0.0),
    )


def _switches(model, x, loss):
    tf.switch_case(
        tf.cast(loss * 2.0, "int32") % 3,
        [
            do(lambda: model.a.assign_add(1.0)),
            do(lambda: model.a.assign_add(10.0)),
            do(lambda: model.b.assign_add(loss)),
        ],
    )


def _counts_in_a_metric(model, x, loss):
    tf.case(
        [
            (loss > 2.2, do(lambda: model.a.assign_add(1.0))),
            (loss > 1.8, do(lambda: model.mean.update_state(loss))),
        ],
        do(lambda: model.mean.update_state(ops.max(x))),
    )


def _chooses_by_a_sum(model, x, loss):
    positive = ops.sum(ops.cast(x[:, 0] > 1.0, "int32"))
    tf.switch_case(
        positive,
        [do(), do(lambda: model.b.assign_add(1.0)), do()],
    )


def _keeps_what_a_map_has_made(model, x, loss):
    rows = tf.map_fn(lambda row: row * tf.reduce_sum(row), x)
    mixed = ops.mean((x - ops.sum(rows, 0)) ** 2)
    tf.cond(loss > 1.8, do(lambda: model.a.assign(mixed)), do())


def _chooses_twice(model, x, loss):
    def often():
        return tf.cond(
            loss > 1.8,
            do(lambda: model.a.assign(ops.sqrt(loss))),
            do(lambda: model.b.assign_add(1.0)),
        )

    tf.cond(ops.max(x) > 2.2, often, do(lambda: model.b.assign_add(9.0)))


def _loops_in_a_branch(model, x, loss):
    def turn(i):
        model.a.assign_add(1.0)
        return (i + 1,)

    tf.cond(
        loss > 1.8,
        do(lambda: tf.while_loop(lambda i: i < 3, turn, [0])),
        do(),
    )


def _stops(model, x, loss):
    model.stop.assign(loss < 1.8)
    tf.cond(model.stop, do(lambda: model.a.assign_add(1.0)), do())
    tf.cond(model.stop.value, do(lambda: model.b.assign_add(1.0)), do())


def _takes_a_weight(model, x, loss):
    tf.cond(
        loss > 1.8,
        do(lambda: model.a.assign_add(model.b)),
        do(lambda: model.a.assign_add(model.b.value)),
    )
    model.b.assign_add(1.0)


def _changes_the_rate(model, x, loss):
    rate = model.optimizer.learning_rate
    tf.cond(
        loss > 1.8,
        do(lambda: rate.assign(rate * 0.5)),
        do(lambda: rate.assign(0.1 * ops.sqrt(loss))),
    )


def _sets_the_rate(model, x, loss):
    model.optimizer.learning_rate.assign(0.1 * loss)


def _restores(model, x, loss):
    kernel, saved = model.head.kernel, tf.ones((8, 2))
    tf.cond(loss > 1.8, do(lambda: kernel.assign(saved)), do())


def _resets_then_reads(model, x, loss):
    model.a.assign(model.a + loss)
    tf.cond(model.a > 5.0, do(lambda: model.a.assign(0.0)), do())
    model.b.assign(model.a * ops.sqrt(loss))


def _a_branch_reads(model, x, loss):
    model.a.assign(loss)
    tf.cond(
        tf.equal(model.b % 2.0, 0.0),
        do(lambda: model.b.assign(model.b + 2.0 * model.a)),
        do(lambda: model.b.assign(2.0)),
    )


def _a_function_reads(model, x, loss):
    model.a.assign(loss)
    tf.function(lambda: model.b.assign(2.0 * model.a))()


def _choosing(model):
    @tf.function
    def body(value):
        if value > 1.8:
            model.a.assign_add(1.0)

    return body


def _chooses_in_a_function(model, x, loss):
    body = _choosing(model)
    body(loss)
    body(loss + 0.5)
    body(3.0 * ops.sqrt(loss) - 2.2)
    body(1.5 + ops.std(x))


def _calls_a_function_in_a_branch(model, x, loss):
    body = _choosing(model)
    body(loss)
    tf.cond(ops.max(x) > 2.2, do(lambda: body(loss)), do())


def _calls_a_function_in_a_function(model, x, loss):
    body = _choosing(model)
    tf.function(lambda value: body(value / 2.0))(2.0 * loss)


def _a_function_reads_averages(model, x, loss):
    @tf.function
    def body():
        model.b.assign(ops.sqrt(model.a))

    model.a.assign(0.9 * model.a + 0.1 * loss)
    body()
    model.a.assign(0.9 * model.a + 0.1 * loss)
    body()


def _a_function_averages(model, x, loss):
    @tf.function
    def body(value):
        model.a.assign(0.9 * model.a + 0.1 * value)

    body(loss)
    model.b.assign(ops.sqrt(model.a))
    body(ops.mean(x))


def _a_branch_averages(model, x, loss):
    average = do(lambda: model.a.assign(0.9 * model.a + 0.1 * loss))
    tf.cond(loss > 1.8, average, do())
    model.b.assign(ops.sqrt(model.a))


def _loops_by_weights(model, x, loss):
    def turn(i):
        model.a.assign_add(1.0)
        model.b.assign_add(2.0)
        return (i + 0.5,)

    model.a.assign(0.0)
    tf.while_loop(lambda i: model.a < 3.0, turn, [0.0])


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("error::keras_conflux.ConfluxWarning")
@pytest.mark.parametrize(
    "keep",
    [
        _doubles_or_halves,
        _counts_large_batches,
        _switches,
        _counts_in_a_metric,
        _chooses_by_a_sum,
        _keeps_what_a_map_has_made,
        _chooses_twice,
        _loops_in_a_branch,
        _stops,
        _takes_a_weight,
        _changes_the_rate,
        _sets_the_rate,
        _restores,
        _resets_then_reads,
        _a_branch_reads,
        _a_function_reads,
        _chooses_in_a_function,
        _calls_a_function_in_a_branch,
        _calls_a_function_in_a_function,
        _a_function_reads_averages,
        _a_function_averages,
        _a_branch_averages,
        _loops_by_weights,
    ],
)
def test_what_is_written_by_a_condition(keep):
    assert_as_on_one_device(keep)


def _counts_by_cases(model, x, loss):
    tf.case(
        [
            (loss > 2.2, do(lambda: model.a.assign_add(1.0))),
            (loss > 1.8, do(lambda: model.b.assign_add(1.0))),
        ],
        do(lambda: model.stop.assign(True)),
    )


def _chooses_by_what_is_captured(model, x, loss):
    is_large = loss > 1.8
    tf.cond(
        loss > 2.2,
        do(),
        lambda: tf.cond(is_large, do(lambda: model.b.assign_add(1.0)), do()),
    )


@pytest.mark.parametrize(
    "keep", [_counts_by_cases, _chooses_by_what_is_captured]
)
def test_a_condition_that_is_made_outside_of_its_branch(keep):
    assert_as_on_one_device(keep)


def _loops_by_samples(model, x, loss):
    def turn(rest):
        model.a.assign_add(1.0)
        return (rest / 2.0,)

    tf.while_loop(lambda rest: rest > 0.5, turn, [8.0 * loss])


def _chooses_in_a_loop(model, x, loss):
    def turn(i):
        tf.cond(loss > 1.8, do(lambda: model.a.assign_add(1.0)), do())
        return (i + 1,)

    tf.while_loop(lambda i: i < 2, turn, [0])


def _calls_in_a_loop(model, x, loss):
    def turn(i):
        _choosing(model)(loss)
        return (i + 1,)

    tf.while_loop(lambda i: i < 2, turn, [0])


def _averages_what_nobody_knows(model, x, loss):
    hidden = tf.numpy_function(lambda value: value.max(), [x], tf.float32)
    hidden.set_shape([])
    model.a.assign(0.9 * model.a + 0.1 * hidden)


@pytest.mark.skipif(MANY == 1, reason="warns of what replicas do otherwise")
@pytest.mark.skipif(COMPILED, reason="XLA compiles no Python, and says so")
def test_an_average_of_what_nobody_knows_warns():
    message = r"how steps\S*/a, which the step sets, is computed"
    with pytest.warns(kc.ConfluxWarning, match=message):
        outcome(_averages_what_nobody_knows, MANY)


def _chooses_by_what_nobody_knows(model, x, loss):
    hidden = tf.numpy_function(lambda value: value, [loss], tf.float32)
    tf.cond(hidden > 1.8, do(lambda: model.a.assign_add(1.0)), do())


@pytest.mark.sampled(1)
@pytest.mark.skipif(MANY == 1, reason="warns of what replicas do otherwise")
@pytest.mark.filterwarnings("ignore:.*XLA cannot compile")
@pytest.mark.parametrize(
    "keep",
    [
        _loops_by_samples,
        _chooses_in_a_loop,
        _calls_in_a_loop,
        _chooses_by_what_nobody_knows,
    ],
)
def test_what_cannot_be_chosen_together_warns(keep):
    message = r"writes steps\S*/a in a loop, or in a branch"
    with pytest.warns(kc.ConfluxWarning, match=message):
        outcome(keep, MANY)  # and replicas are in sync


@pytest.mark.skipif(MANY == 1, reason="warns of what replicas do otherwise")
@pytest.mark.filterwarnings("ignore:.*XLA cannot compile")
def test_a_metric_that_cannot_be_updated_together_warns():
    def keep(model, x, loss):
        mean = model.mean
        hidden = tf.numpy_function(lambda value: value, [loss], tf.float32)
        tf.cond(hidden > 1.8, do(lambda: mean.update_state(1.0)), do())

    with pytest.warns(kc.ConfluxWarning, match=r"writes mean\S*/(total|count)"):
        outcome(keep, MANY)


@pytest.mark.skipif(MANY == 1, reason="replicas exchange conditions")
@pytest.mark.parametrize("writes", [False, True])
def test_conditions_are_exchanged_only_where_something_is_written(
    writes, monkeypatch
):
    exchanged = []

    def global_values(tensors, step):
        exchanged.extend(tensors)
        return original(tensors, step)

    original = choices.global_values
    monkeypatch.setattr(choices, "global_values", global_values)

    def keep(model, x, loss):
        write = do(lambda: model.a.assign_add(1.0))
        tf.cond(loss > 1.8, write if writes else do(), do())

    outcome(keep, MANY)
    assert bool(exchanged) == writes
