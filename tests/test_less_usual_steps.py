"""Steps that use what they are given in less usual ways."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from keras import layers
from keras import ops
from models import assert_same_training
from models import regression

import keras_conflux as kc

X, Y = regression(11)  # the last batch is smaller


class Stepping(keras.Model):
    """Trains and predicts by functions."""

    def __init__(self, train, predict=None, metric=None):
        super().__init__()
        self.net = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
        self.head = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
        self.own_metric = metric
        self.generator = keras.random.SeedGenerator(1)
        self._train, self._predict = train, predict

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self._train(self, x)

    def predict_step(self, data):
        return self._predict(self(data))


def apply(model, tape, loss):
    weights = model.trainable_variables
    model.optimizer.apply_gradients(
        zip(tape.gradient(loss, weights), weights, strict=True)
    )


def trained(count, train, metric=None, **options):
    """Returns the logs of each batch, and the weights."""
    keras.utils.set_random_seed(1)
    model = Stepping(train, metric=metric and metric())
    model.compile("sgd", jit_compile=False)
    model.build((None, 8))
    if count:
        kc.replicate(model, count, **options)
    logs = [
        model.fit(X[i : i + 6], batch_size=6, shuffle=False, verbose=0).history
        for i in (0, 6)
    ]
    return logs, model.get_weights()


def assert_equal(one, many):
    for expected, got in zip(
        *map(keras.tree.flatten, (one, many)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


def by_a_root(rows):
    mean = ops.sqrt(ops.mean(rows**2))
    return mean, lambda: (mean - 3) ** 2


def by_centered_rows(rows):
    centered = rows - ops.mean(rows, 0)
    return centered, lambda: ops.mean(centered**3)


def by_similarities(rows):
    similar = rows @ ops.transpose(rows)
    return similar, lambda: ops.mean(ops.exp(-similar))


def by_a_mean(rows):
    mean = ops.mean(rows, 0)
    return mean, lambda: ops.sum(ops.exp(mean))


def by_a_total(rows):
    total = ops.sum(rows, 0)
    return total, lambda: ops.mean(ops.tanh(total))


def by_rows_over_their_number(rows):
    parts = rows / ops.cast(ops.shape(rows)[0], rows.dtype)
    return parts, lambda: ops.exp(ops.sum(parts))


@pytest.mark.parametrize(
    "made",
    [
        by_a_root,
        by_a_mean,
        by_a_total,
        by_centered_rows,
        by_rows_over_their_number,
        by_similarities,
    ],
)
def test_derivatives_by_what_is_of_all_samples(made, count):
    def step(model, x):
        with tf.GradientTape() as outer:
            rows = model.net(x)
            with tf.GradientTape() as tape:
                source, loss = made(rows)
                tape.watch(source)
                loss = loss()
            slopes = tape.gradient(loss, source)
            total = ops.mean(rows**2)
        apply(model, outer, total)
        return {"slopes": ops.sum(slopes**2), "total": total}

    assert_equal(trained(None, step), trained(count, step))


def penalized(loss_of):
    """Returns a step whose loss is made of slopes by the inputs."""

    def step(model, x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = loss_of(model, model.net(x))
            slopes = tape.gradient(loss, x)
            penalty = ops.mean(ops.sum(slopes**2, 1))
        apply(model, outer, penalty)
        return {"penalty": penalty}

    return step


def by_weights(model, x):
    """Penalizes the slopes by weights of what is compared."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = ops.std(model.net(x))
        slopes = tape.gradient(loss, model.net.trainable_variables)
        penalty = sum(ops.sum(each**2) for each in slopes)
    apply(model, outer, penalty)
    return {"penalty": penalty}


def thrice(model, x):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as middle:
            middle.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                rows = ops.tanh(model.net(x))
                loss = ops.mean(rows**3) / (1 + ops.mean(rows**2))
            slopes = inner.gradient(loss, x)
            curved = ops.mean(slopes**2)
        again = middle.gradient(curved, x)
        penalty = ops.mean(again**2)
    apply(model, outer, penalty)
    return {"penalty": penalty}


def at_mixed_points(model, x):
    mixed = 0.7 * x + 0.3 * x[::-1]
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            loss = ops.std(model.net(mixed))
        slopes = tape.gradient(loss, mixed)
        penalty = ops.mean(ops.sum(slopes**2, 1))
    apply(model, outer, penalty)
    return {"penalty": penalty}


def by_points(model, x):
    """Fits a differential equation at points that are no samples."""
    points = ops.reshape(ops.linspace(0.0, 1.0, 5 * x.shape[1]), (5, -1))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as middle:
            middle.watch(points)
            with tf.GradientTape() as inner:
                inner.watch(points)
                rows = ops.tanh(model.net(points))
            slopes = inner.gradient(rows, points)
        residual = middle.gradient(slopes, points) + slopes
        penalty = ops.mean(residual**2) + ops.mean(model.net(x) ** 2)
    apply(model, outer, penalty)
    return {"penalty": penalty}


SECOND = {
    "a root": penalized(lambda _, rows: ops.sqrt(ops.mean(rows**2))),
    "similarities": penalized(
        lambda _, rows: ops.mean(ops.exp(-rows @ ops.transpose(rows)))
    ),
    "attention of a layer": penalized(
        lambda model, rows: model.head(
            ops.softmax(rows @ ops.transpose(rows)) @ rows
        )
    ),
    "deviations of a layer": penalized(
        lambda model, rows: model.head(ops.tanh(rows) * ops.var(rows, 0))
    ),
    "a mean of a layer": penalized(
        lambda model, rows: model.head(rows * ops.exp(ops.mean(rows, 0)))
    ),
    "weights": by_weights,
    "three times": thrice,
    "mixed points": at_mixed_points,
    "points": by_points,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_what_is_of_all_samples(
    name, microbatches, count
):
    step = SECOND[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        one, many = (
            trained(None, step),
            trained(count, step, microbatches=microbatches),
        )
    assert_equal(one, many)


@pytest.mark.parametrize("microbatches", [None, 2])
def test_what_is_compared_may_be_checked(microbatches, count):
    def step(model, x):
        with tf.GradientTape() as tape:
            rows = model.net(x)
            ratio = ops.sum(rows**2) / ops.sum(1 + ops.abs(rows))
            loss = tf.debugging.check_numerics(ratio, "of the loss")
        apply(model, tape, loss)
        return {"loss": loss}

    assert_equal(
        trained(None, step), trained(count, step, microbatches=microbatches)
    )


def beside_a_mean(model, x, number):
    return ops.mean(model.net(x) ** 2) + number * _squares(model.net)


def alone(model, x, number):
    return number * _squares(model.net)


def of_what_is_mixed(model, x, number):
    scale = 1 + number * _squares(model.net)
    return ops.mean(model.head((x - ops.mean(x, 0))[:, :3] / scale) ** 2)


def _squares(net):
    return ops.sum(net.weights[0] ** 2)


@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("made", [beside_a_mean, alone, of_what_is_mixed])
def test_derivatives_by_a_number_of_samples(made, microbatches, count):
    def step(model, x):
        number = ops.cast(ops.shape(x)[0], "float32")
        with tf.GradientTape() as tape:
            loss = made(model, x, 0.1 * number)
        apply(model, tape, loss)
        return {"loss": loss}

    got = trained(count, step, microbatches=microbatches)
    assert_equal(trained(None, step), got)


@several
@pytest.mark.parametrize("is_direct", [True, False])
def test_a_derivative_past_what_an_inner_gradient_computed_warns(is_direct):
    """As by the weights of samples that are learned by a step ahead."""

    def step(model, x):
        kernel = model.net.weights[0]
        with tf.GradientTape() as outer:
            weights = ops.ones_like(x[:, 0]) / ops.cast(
                ops.shape(x)[0], x.dtype
            )
            outer.watch(weights)
            with tf.GradientTape() as tape:
                loss = ops.sum(weights * ops.sum((x @ kernel) ** 2, 1))
            ahead = kernel - 0.1 * tape.gradient(loss, kernel)
            loss = ops.mean((x @ ahead) ** 2)
            loss += is_direct * ops.sum(weights**2)
        found = outer.gradient(loss, weights, unconnected_gradients="zero")
        return {"found": ops.sum(found)}

    with pytest.warns(kc.ConfluxWarning, match="a GradientTape differentiates"):
        trained(2, step)


@several
def test_a_derivative_by_output_gradients_of_what_is_compared_warns():
    def step(model, x):
        with tf.GradientTape() as outer:
            rows = model.net(x)
            seed = ops.ones_like(rows)
            outer.watch(seed)
            with tf.GradientTape() as tape:
                tape.watch(x)
                compared = ops.tanh(model.net(x)) * ops.var(model.net(x), 0)
            slopes = tape.gradient(compared, x, output_gradients=seed)
            loss = ops.sum(slopes)
        product = outer.gradient(loss, seed, unconnected_gradients="zero")
        return {"product": ops.sum(product)}

    with pytest.warns(kc.ConfluxWarning, match="a GradientTape differentiates"):
        trained(2, step)


def following(model, loss, primals=None):
    """Returns the derivative of a loss along ones, in forward mode."""
    if primals is None:
        primals = [weight.value for weight in model.trainable_variables]
    tangents = [tf.ones_like(each) for each in primals]
    with tf.autodiff.ForwardAccumulator(primals, tangents) as accumulator:
        made = loss()
    return accumulator.jvp(made)


def along_weights(model, x):
    with tf.GradientTape() as tape:
        loss = ops.mean(model.net(x) ** 2)
    apply(model, tape, loss)
    slope = following(model, lambda: ops.mean(model.net(x) ** 2))
    return {"slope": slope, "loss": loss}


def by_curvature(model, x):
    with tf.GradientTape() as tape:
        slope = following(model, lambda: ops.mean(model.net(x) ** 2))
    apply(model, tape, slope)
    return {"slope": slope}


def by_curvature_of_what_is_compared(model, x):
    with tf.GradientTape() as tape:
        slope = following(model, lambda: ops.std(model.net(x)))
    apply(model, tape, slope)
    return {"slope": slope}


def along_inputs(model, x):
    with tf.GradientTape() as tape:
        slopes = following(model, lambda: model.net(x) ** 2, [x])
        loss = ops.mean(slopes**2)
    apply(model, tape, loss)
    return {"loss": loss}


FORWARD = [
    along_weights,
    by_curvature,
    by_curvature_of_what_is_compared,
    along_inputs,
]


@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("step", FORWARD)
def test_derivatives_in_forward_mode(step, microbatches, count):
    assert_equal(
        trained(None, step), trained(count, step, microbatches=microbatches)
    )


@several
def test_forward_mode_over_summed_gradients_is_refused():
    def step(model, x):
        weights = [weight.value for weight in model.trainable_variables]

        def gradient():
            with tf.GradientTape() as tape:
                loss = ops.mean(model.net(x) ** 2)
            return tape.gradient(loss, weights)

        return {"curved": following(model, gradient)[0]}

    with pytest.raises(NotImplementedError, match="around the accumulator"):
        trained(2, step)


@several
def test_forward_mode_through_a_layer_that_mixes_is_refused():
    center = layers.Lambda(lambda x: x - ops.mean(x, 0))

    def step(model, x):
        return {"j": ops.mean(following(model, lambda: center(x) ** 2, [x]))}

    with pytest.raises(NotImplementedError, match="with two GradientTapes"):
        trained(2, step)


MIXING = {
    "a mean": lambda x: x - ops.mean(x, axis=0),
    "a sum": lambda x: ops.cumsum(x, axis=0),
    "neighbours": lambda x: ops.roll(x, 1, axis=0),
    "softmax": layers.Softmax(axis=0),
    "norms": layers.UnitNormalization(axis=0),
}


class Standardized(layers.Layer):
    """Normalizes each feature over the batch, and scales it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return self.scale * (x - ops.mean(x, 0)) / (ops.std(x, 0) + 0.5)


def functional(mix, *shape):
    inputs = layers.Input(shape)
    mixed = mix(layers.Dense(3, use_bias=False)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(mixed)))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def assert_mixes_as_one_device(count, build, x):
    found = []
    for each in (None, count):
        keras.utils.set_random_seed(1)
        model = build()
        if each:
            kc.replicate(model, each)
        logs = model.fit(x, Y[:, :1], 6, epochs=2, shuffle=False, verbose=0)
        found.append((model, logs))
    (one, first), (many, second) = found
    assert_same_training(one, many, first, second)


class Scaled(layers.Layer):
    """Has no derivative for a sample alone, whose variance is 0."""

    def call(self, x):
        return x * ops.log(ops.var(x, 0))


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_part_of_one_sample_need_not_have_a_derivative(microbatches, count):
    if (batch := count * (microbatches or 1)) == 1:
        pytest.skip("one device has none either")
    found = []
    for each in (None, count):
        keras.utils.set_random_seed(1)
        model = functional(Scaled(), 8)
        if each:
            kc.replicate(model, each, microbatches=microbatches)
        model.fit(X[:8], Y[:8, :1], batch, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert np.all(np.isfinite(found[0][0]))
    assert_equal(*found)


@pytest.mark.parametrize("name", MIXING)
def test_a_functional_model_may_mix_samples(name, count):
    assert_mixes_as_one_device(count, lambda: functional(MIXING[name], 8), X)


def test_a_layer_may_mix_samples(count):
    assert_mixes_as_one_device(count, lambda: functional(Standardized(), 8), X)


@pytest.mark.long
def test_what_a_layer_mixes_keeps_its_mask(count):
    class Centered(layers.Layer):
        supports_masking = True

        def call(self, x):
            return x - 0.5 * ops.mean(x, 0)

    class Masked(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [
                layers.Embedding(4, 3, mask_zero=True),
                Centered(),
                layers.GlobalAveragePooling1D(),
                layers.Dense(1),
            ]

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    def build():
        model = Masked()
        model.compile("sgd", "mse", jit_compile=False)
        model.build((None, 8))
        return model

    tokens = np.random.default_rng(0).integers(0, 4, (11, 8))
    assert_mixes_as_one_device(count, build, tokens)


@several
@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_layers_that_mix_images_warn(kind):
    model = functional(getattr(layers, kind)(seed=1), 6, 6, 1)
    kc.replicate(model, 2)
    with pytest.warns(kc.ConfluxWarning, match="depends on other samples"):
        model.fit(np.ones([11, 6, 6, 1]), Y[:, :1], batch_size=6, verbose=0)


@several
def test_python_code_of_an_activation_warns():
    def centered(x):
        found = tf.numpy_function(lambda a: a - a.mean(0), [x], x.dtype)
        return x + tf.stop_gradient(tf.ensure_shape(found, x.shape))

    model = keras.Sequential([layers.Dense(1, activation=centered)])
    model.compile("sgd", "mse", jit_compile=False)
    kc.replicate(model, 2)
    with pytest.warns(kc.ConfluxWarning, match="depends on other samples"):
        model.fit(X, Y[:, :1], batch_size=6, verbose=0)


@pytest.mark.filterwarnings("error::keras_conflux.ConfluxWarning")
def test_a_loop_in_a_loss_under_a_persistent_tape(count):
    def step(model, x):
        with tf.GradientTape(persistent=True) as tape:
            sizes = tf.map_fn(lambda row: ops.sum(row**2), model.net(x))
            loss = ops.mean(sizes) ** 2
        apply(model, tape, loss)
        return {"loss": loss}

    assert_equal(trained(None, step), trained(count, step))


@several
def test_a_write_in_a_branch_under_a_persistent_tape_warns():
    class Moving(layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight((), "zeros", trainable=False)

        def call(self, x):
            tf.cond(
                self.mean.value < 9.0,
                lambda: (self.mean.assign_add(ops.mean(x)), 0)[1],
                lambda: 0,
            )
            return x

    def step(model, x):
        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean(moving(model.net(x)) ** 2)
        apply(model, tape, loss)
        return {"loss": loss}

    moving = Moving()
    with pytest.warns(kc.ConfluxWarning, match="in a loop, or in a branch"):
        trained(2, step)


@pytest.mark.parametrize("seed", [7, None])
def test_samples_may_be_shuffled(seed, count):
    def step(model, x):
        with tf.GradientTape() as tape:
            features = model.net(x)
            own = model.generator if seed is None else seed
            others = keras.random.shuffle(features, seed=own)
            loss = ops.mean((features - others) ** 2 * x[:, :1])
        apply(model, tape, loss)
        return {"loss": loss}

    assert_equal(trained(None, step), trained(count, step))


def then_reset(model, x):
    model.own_metric.update_state(model.net(x))
    result = model.own_metric.result()
    model.own_metric.reset_state()
    return {"result": result}


def before_and_after(model, x):
    before = model.own_metric.result()
    model.own_metric.update_state(model.net(x))
    return {"before": before, "after": model.own_metric.result()}


@pytest.mark.parametrize("step", [then_reset, before_and_after])
def test_a_result_is_what_the_metric_was_when_it_was_read(step, count):
    expected = trained(None, step, keras.metrics.Mean)
    assert_equal(expected, trained(count, step, keras.metrics.Mean))


class Adding(keras.metrics.Metric):
    """Sets its variable by a function."""

    def __init__(self, function):
        super().__init__(name="adding")
        self.total = self.add_weight(shape=(), initializer="zeros", name="t")
        self.function = function

    def update_state(self, rows):
        self.total.assign(self.function(self.total, rows))

    def result(self):
        return self.total + 0.0


ADDED = {
    "a number first": lambda total, rows: 1.0 + total,
    "a mean first": lambda total, rows: 0.1 * ops.mean(rows) + 0.9 * total,
    "from a mean": lambda total, rows: ops.mean(rows) - total,
    "from a sum": lambda total, rows: ops.sum(rows) - total,
    "less a number": lambda total, rows: total - 1.0,
}


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("name", ADDED)
def test_a_metric_may_add_in_any_order(name, microbatches, count):
    def step(model, x):
        model.own_metric.update_state(model.net(x))
        return {"result": model.own_metric.result()}

    def metric():
        return Adding(ADDED[name])

    got = trained(count, step, metric, microbatches=microbatches)
    assert_equal(trained(None, step, metric), got)


PREDICTED = {
    "rows minus their mean": lambda x: x - ops.mean(x, 0),
    "a sum": ops.sum,
    "a mean": ops.mean,
    "a mean of columns": lambda x: ops.mean(x, 0),
    "similarities": lambda x: x @ ops.transpose(x),
    "rows": lambda x: {"a": x, "b": ops.argmax(x, 1)},
}


@pytest.mark.parametrize("name", PREDICTED)
def test_predict_step_may_mix_samples(name, count):
    def predicted(count):
        keras.utils.set_random_seed(1)
        model = Stepping(None, PREDICTED[name])
        model.compile("sgd", jit_compile=False)
        model.build((None, 8))
        if count:
            kc.replicate(model, count)
        parts = X[:6], X[6:]
        return [model.predict(x, batch_size=6, verbose=0) for x in parts]

    assert_equal(predicted(None), predicted(count))


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_categories_are_drawn_any_number_of_times(samples, count):
    def step(model, x):
        drawn = keras.random.categorical(
            model.net(x), samples, seed=model.generator
        )
        return {"mean": ops.mean(ops.cast(drawn, "float32"))}

    assert_equal(trained(None, step), trained(count, step))


@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_penalty_at_mixed_inputs(microbatches, count):
    def step(model, x):
        mixed = 0.5 * x + 0.5 * ops.flip(x, 0)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(mixed)
                scores = ops.sum(model.net(mixed) ** 2, 1)
            slopes = tape.gradient(scores, mixed)
            penalty = ops.mean(ops.sum(slopes**2, 1))
        apply(model, outer, penalty)
        return {"penalty": penalty}

    got = trained(count, step, microbatches=microbatches)
    assert_equal(trained(None, step), got)


def counted_in_a_loop(model, x):
    def body(turn, count):
        model.own_metric.update_state(count)
        return turn + 1, count + tf.reduce_sum(tf.cast(x > 0, tf.int32))

    tf.while_loop(lambda turn, count: turn < 3, body, (0, 0))
    return {"result": model.own_metric.result()}


def normalized_in_a_loop(model, x):
    def body(turn, rows):
        model.own_metric.update_state(rows**2)
        return turn + 1, rows / tf.norm(rows)

    tf.while_loop(lambda turn, rows: turn < 3, body, (0, x))
    return {"result": model.own_metric.result()}


@several
@pytest.mark.parametrize("step", [counted_in_a_loop, normalized_in_a_loop])
def test_a_loop_that_writes_what_all_samples_make_warns(step):
    with pytest.warns(kc.ConfluxWarning, match="whose next turn"):
        trained(2, step, keras.metrics.Mean)


def test_a_loop_that_writes_rows_of_samples(count):
    def step(model, x):
        def body(turn, rows):
            model.own_metric.update_state(rows**2)
            return turn + 1, 2 * rows

        tf.while_loop(lambda turn, rows: turn < 3, body, (0, x))
        return {"result": model.own_metric.result()}

    expected = trained(None, step, keras.metrics.Mean)
    assert_equal(expected, trained(count, step, keras.metrics.Mean))


def dense_by_class(values, classes):
    order = tf.argsort(classes, stable=True)
    grouped = tf.RaggedTensor.from_value_rowids(
        tf.gather(values, order), tf.gather(classes, order)
    )
    return tf.reduce_mean(grouped.to_tensor() ** 2)


def masked_by_class(values, classes):
    counts = tf.math.bincount(classes, minlength=3, maxlength=3)
    mask = tf.cast(tf.sequence_mask(counts), values.dtype)
    return tf.reduce_mean(mask) * tf.reduce_sum(values**2)


@pytest.mark.parametrize("made", [dense_by_class, masked_by_class])
def test_lengths_may_count_samples(made, count):
    def step(model, x):
        classes = tf.cast(x[:, 0] > 0, tf.int32) + tf.cast(
            x[:, 1] > 0, tf.int32
        )
        with tf.GradientTape() as tape:
            loss = made(model.net(x)[:, 0], classes)
        apply(model, tape, loss)
        return {"loss": loss}

    assert_equal(trained(None, step), trained(count, step))


@several
def test_a_value_of_unknown_rank_warns():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.5)

    def step(model, x):
        found = table.lookup(tf.cast(x[:, 0] > 0, tf.int64))
        return {"found": ops.mean(found)}

    with pytest.warns(kc.ConfluxWarning, match="does not show how"):
        logs, _ = trained(2, step)
    assert logs[0]["found"] == [0.5]


def by_other_losses(model, x):
    return [ops.mean(model.net(x) ** 2), ops.mean(ops.abs(model.net(x)))]


def by_mixing_losses(model, x):
    return [ops.std(model.net(x)), ops.log(ops.mean(ops.exp(model.net(x))))]


@pytest.mark.parametrize("losses", [by_other_losses, by_mixing_losses])
@pytest.mark.parametrize("gives_zeros", [False, True])
def test_gradients_in_branches_that_samples_choose(losses, gives_zeros, count):
    """Replicas that chose apart would add up, or wait for, different ones."""

    def step(model, x):
        weights = model.net.trainable_variables

        def slopes_of(number):
            with tf.GradientTape() as tape:
                loss = losses(model, x)[number]
            return tape.gradient(loss, weights)

        slopes = tf.cond(
            ops.mean(x) > -0.05,
            lambda: slopes_of(0),
            lambda: (
                [*map(tf.zeros_like, weights)] if gives_zeros else slopes_of(1)
            ),
        )
        model.optimizer.apply(slopes, weights)
        return {"first": ops.sum(slopes[0])}

    assert_equal(trained(None, step), trained(count, step))


@several
def test_gradients_in_branches_of_unknown_conditions_are_refused():
    def step(model, x):
        def slope():
            with tf.GradientTape() as tape:
                loss = ops.mean(model.net(x) ** 2)
            return tape.gradient(loss, model.net.trainable_variables[0])

        chosen = tf.numpy_function(lambda rows: rows.sum() > 0, [x], tf.bool)
        chosen.set_shape([])
        tf.cond(chosen, slope, lambda: ops.zeros((8, 3)))
        return {"mean": ops.mean(x)}

    with pytest.raises(NotImplementedError, match="computes gradients in a"):
        trained(2, step)


def by_a_counter(model, calls):
    return len(calls)


def by_a_flag(model, calls):
    return 1 + (len(calls) > 1)


def by_numpy(model, calls):
    return np.random.default_rng(len(calls)).normal(size=(6, 3))


def by_large_arrays(model, calls):
    return np.random.default_rng(len(calls)).normal(size=(70, 3))[:1]


def by_other_weights(model, calls):
    return model.head.weights[0][len(calls) % 3 - 1, :1]


@several
@pytest.mark.parametrize(
    "made", [by_a_counter, by_a_flag, by_numpy, by_large_arrays]
)
def test_python_that_changes_between_replicas_is_refused(made):
    calls = []

    def step(model, x):
        calls.append(x)
        factor = tf.reduce_mean(tf.constant(made(model, calls), x.dtype))
        with tf.GradientTape() as tape:
            loss = factor * ops.mean(model.net(x) ** 2)
        apply(model, tape, loss)
        return {"loss": loss}

    with pytest.raises(kc.StrategyError, match="Python code of the step did"):
        trained(2, step)


@several
def test_replicas_that_read_different_weights_are_refused():
    calls = []

    def step(model, x):
        calls.append(x)
        scale = model.head.trainable_variables[len(calls) % 2]
        return {"loss": ops.mean(x) * ops.sum(scale)}

    with pytest.raises(kc.StrategyError, match="variable"):
        trained(2, step)


def test_an_optimizer_that_a_step_builds_is_asked_again(count):
    """`scale_loss` takes its first scale for a constant until it is built."""

    def train(devices):
        keras.utils.set_random_seed(1)
        model = Stepping(scaled)
        model.scaling = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=1
        )
        model.compile(jit_compile=False)
        model.build((None, 8))
        if devices:
            kc.replicate(model, devices)
        model.fit(X, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), model.scaling.dynamic_scale.numpy()

    def scaled(model, x):
        weights = model.net.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean(model.net(x) ** 2)
            large = model.scaling.scale_loss(loss)
        model.scaling.apply(tape.gradient(large, weights), weights)
        return {"loss": loss}

    assert_equal(train(None), train(count))


@pytest.mark.parametrize("is_built", [False, True])
def test_an_optimizer_that_a_loop_builds_is_asked_again(is_built):
    def train(decorated, replicate):
        keras.utils.set_random_seed(1)
        net = replicate(keras.Sequential([layers.Input((8,)), layers.Dense(3)]))
        scaling = replicate(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1),
                initial_scale=8.0,
                dynamic_growth_steps=1,
            )
        )
        if is_built:
            scaling.build(net.trainable_variables)

        def step(x):
            with tf.GradientTape() as tape:
                loss = scaling.scale_loss(ops.mean(net(x) ** 2))
            slopes = tape.gradient(loss, net.trainable_variables)
            if replicate is not one_device:
                slopes = kc.allreduce("mean", slopes, weight=len(x))
            scaling.apply(slopes, net.trainable_variables)

        run = decorated(step)
        for _ in range(5):
            run(X if replicate is one_device else kc.split(X, devices=MANY))
        return net.get_weights()

    def one_device(held):
        return held

    assert_equal(
        train(tf.function, one_device),
        train(
            kc.withdevices(devices=MANY),
            lambda held: kc.replicate(held, devices=MANY),
        ),
    )


def _totals(count, train, samples=1):
    model = Stepping(train)
    model.compile("sgd", jit_compile=False)
    if count:
        kc.replicate(model, count)
    return model.fit(X[:samples], verbose=0).history["total"]


@several
def test_a_replica_without_samples_adds_nothing_to_all_reduce_of_tensorflow():
    def train(model, x):
        reduce = tf.distribute.get_replica_context().all_reduce
        return {"total": reduce(tf.distribute.ReduceOp.SUM, ops.sum(x))}

    assert _totals(MANY, train) == pytest.approx(_totals(None, train))


def _gathered(model, x):
    gather = tf.distribute.get_replica_context().all_gather
    return {"total": ops.sum(gather(x, axis=0))}


def _merged(model, x):
    def total(strategy, each):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None)

    merge = tf.distribute.get_replica_context().merge_call
    return {"total": merge(total, args=(ops.sum(x),))}


@several
@pytest.mark.parametrize("train", [_gathered, _merged])
def test_merged_values_of_replicas_without_samples_warn(train):
    with pytest.warns(kc.ConfluxWarning, match="`merge_call` and `all_gather`"):
        _totals(MANY, train)
    found = _totals(MANY, train, MANY + 1)
    assert found == pytest.approx(_totals(None, train, MANY + 1))
