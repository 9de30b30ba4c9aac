"""A loop's step that computes something else than one device warns, by name."""

import contextlib
import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several

import keras_conflux as kc

pytestmark = several
EVEN = 2 * MANY
UNEVEN = EVEN + 1
X = np.random.default_rng(0).normal(size=(UNEVEN, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(UNEVEN, 1)).astype("float32")


def network(normalized=False):
    keras.utils.set_random_seed(1)
    middle = [keras.layers.BatchNormalization()] * normalized
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(6, "tanh"),
            *middle,
            keras.layers.Dense(1),
        ]
    )


def error(model, x, y):
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def contrast(model, x, y):
    """A loss of all samples, which replicas have alike."""
    rows = kc.allgather(model(x, training=True))
    return tf.reduce_mean((rows - tf.transpose(rows) - 1) ** 2)


def beside_a_mean(model, x, y):
    """A loss with a number of all samples through which no gradient goes."""
    out = model(x)
    mean = kc.allreduce("mean", tf.reduce_mean(y), weight=len(x))
    return tf.reduce_mean((out - tf.stop_gradient(mean)) ** 2)


def trained(
    reduced,
    loss_of=error,
    count=UNEVEN,
    made=network,
    devices=MANY,
    scope=None,
    **options,
):
    """Trains for a step, in a scope, whose gradients `reduced` reduces."""
    model = kc.replicate(made(), devices, **options)
    optimizer = kc.replicate(keras.optimizers.SGD(0.1), devices)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        weights = model.trainable_variables
        gradients = reduced(tape.gradient(loss, weights), x)
        optimizer.apply(gradients, weights)

    with scope or contextlib.nullcontext():
        kc.withdevices(step)(*kc.split((X[:count], Y[:count]), MANY))
    return model


def weighted(gradients, x):
    return kc.allreduce("mean", gradients, weight=len(x))


def some(gradients, x):
    return kc.allreduce("mean", gradients[:2], weight=len(x)) + gradients[2:]


def by_a_norm(gradients, x):
    norm = kc.allreduce("sum", tf.linalg.global_norm(gradients))
    return [each / norm for each in gradients]


def clipped_apart(gradients, x):
    norm = tf.linalg.global_norm(gradients)
    return [each / norm for each in weighted(gradients, x)]


def clipped_together(gradients, x):
    gradients = weighted(gradients, x)
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def by_a_number(gradients, x):
    return kc.allreduce("mean", gradients, weight=2)


def by_tensorflow(gradients, x):
    mean = tf.distribute.ReduceOp.MEAN
    return tf.distribute.get_replica_context().all_reduce(mean, gradients)


def alike(gradients, x):
    return kc.allreduce("mean", gradients)


def normalizing():
    return kc.synchronize_batch_norm(network(normalized=True))


TOUCHED = "no `allreduce` has touched"
COUNTS = "counts all replicas alike"
PASSED = "passed through a collective"
MISTAKES = {
    "some": (TOUCHED + r" \(of .*/kernel\)", dict(reduced=some)),
    "by a norm": (TOUCHED, dict(reduced=by_a_norm)),
    "clipped apart": (TOUCHED, dict(reduced=clipped_apart)),
    "by a number": (COUNTS, dict(reduced=by_a_number)),
    "by TensorFlow": (COUNTS, dict(reduced=by_tensorflow)),
    "gathered": (PASSED, dict(reduced=weighted, loss_of=contrast)),
    "normalized": (PASSED, dict(reduced=weighted, made=normalizing)),
}
RIGHT = {
    "weighted": dict(reduced=weighted),
    "clipped together": dict(reduced=clipped_together),
    "even": dict(reduced=by_a_number, count=EVEN),
    "even, by TensorFlow": dict(reduced=by_tensorflow, count=EVEN),
    "gathered": dict(reduced=alike, loss_of=contrast),
    "gathered, even": dict(reduced=weighted, loss_of=contrast, count=EVEN),
    "beside a mean": dict(reduced=weighted, loss_of=beside_a_mean),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_gradients_that_are_not_the_whole_batch_s(mistake):
    told, options = MISTAKES[mistake]
    with pytest.warns(kc.ConfluxWarning, match=told) as warned:
        trained(**options)
    assert len(warned) == 1


@pytest.mark.parametrize("case", RIGHT)
def test_gradients_of_the_whole_batch_warn_of_nothing(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        trained(**RIGHT[case])


def test_a_step_is_warned_of_in_the_program_that_counts_alike():
    @kc.withdevices
    def mean(x, weighs):
        weight = len(x) if weighs else None
        return kc.allreduce("mean", tf.reduce_mean(x), weight=weight)

    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        mean(kc.split(X[:EVEN], MANY), False)
        mean(kc.split(X[:UNEVEN], MANY), True)
    with pytest.warns(kc.ConfluxWarning, match=COUNTS):
        mean(kc.split(X[:UNEVEN], MANY), False)


@pytest.mark.parametrize("case", [(contrast, network), (error, normalizing)])
def test_losses_are_weighed_before_they_pass_a_collective(case):
    """As the warning says."""
    loss_of, made = case

    def share_of(model, x, y):
        total = kc.allreduce("sum", len(x))
        share = tf.cast(len(x) / total, tf.float32)
        return share * loss_of(model, x, y)

    found = trained(
        lambda gradients, x: kc.allreduce("sum", gradients),
        share_of,
        made=made,
    )
    alone = network(normalized=made is normalizing)
    with tf.GradientTape() as tape:
        if loss_of is contrast:
            rows = alone(X)
            loss = tf.reduce_mean((rows - tf.transpose(rows) - 1) ** 2)
        else:
            loss = error(alone, X, Y)
    weights = alone.trainable_variables
    keras.optimizers.SGD(0.1).apply(tape.gradient(loss, weights), weights)
    for a, b in zip(found.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def halves(kept, x):
    return [each.value / 2 for each in kept]


def halves_in_a_function(kept, x):
    return tf.function(lambda: halves(kept, x))()


def halves_after_a_choice(kept, x):
    return tf.cond(kept[0][0, 0] > 0, lambda: halves(kept, x), lambda: kept)


def shares(kept, x):
    return [each.value / tf.cast(len(x), each.dtype) for each in kept]


def other_halves(kept, x):
    return [each.value / (2 + kc.replica().index) for each in kept]


def noisy(kept, x):
    return [each.value + tf.random.normal(each.shape) for each in kept]


def applied_later(made, devices=MANY):
    """Applies in a second step what is made of reduced, kept gradients."""
    model = kc.replicate(network(), devices)
    optimizer = kc.replicate(keras.optimizers.SGD(0.1), devices)
    weights = model.trainable_variables
    with kc.replicate(devices=devices).scope():
        kept = [keras.Variable(tf.zeros_like(each)) for each in weights]

    @kc.withdevices
    def accumulate(x, y):
        with tf.GradientTape() as tape:
            loss = error(model, x, y)
        found = weighted(tape.gradient(loss, weights), x)
        for each, gradient in zip(kept, found, strict=True):
            each.assign_add(gradient)

    @kc.withdevices
    def update(x):
        optimizer.apply(made(kept, x), weights)

    for _ in range(2):
        accumulate(*kc.split((X, Y), devices))
    for size in (EVEN, UNEVEN):  # the second is traced for any size
        update(kc.split(X[:size], devices))
    return model


KEPT = [halves, halves_in_a_function, halves_after_a_choice]


@pytest.mark.parametrize("made", KEPT)
def test_gradients_that_are_made_of_equal_copies(made):
    many, one = applied_later(made), applied_later(made, devices=1)
    kc.assert_in_sync(many)
    for a, b in zip(many.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [shares, other_halves, noisy])
def test_gradients_that_are_made_of_more_than_equal_copies(made):
    with pytest.warns(kc.ConfluxWarning, match=TOUCHED):
        model = applied_later(made)
    assert not kc.in_sync(model)


def test_gradients_that_are_made_of_sums():
    metric = kc.replicate(keras.metrics.Sum(), MANY)
    kc.withdevices(lambda x: metric.update_state(x))(kc.split(X, MANY))
    with pytest.warns(kc.ConfluxWarning, match=TOUCHED):
        applied_later(lambda kept, _: [x + metric.total.value for x in kept])


def reduced_in_a_function(gradients, x):
    return tf.function(weighted)(gradients, x)


def of_one(gradients, x):
    return kc.reduce("sum", [*map(tf.ones_like, gradients)])


def by_length(gradients, x):
    return [each / len(x) for each in weighted(gradients, x)]


def own(gradients, x):
    return gradients


def lengths(gradients, x):
    return [len(x) * tf.ones_like(each) for each in gradients]


def halved(given):
    return [each / 2 for each in given]


def beside_noise(given):
    return [each + tf.random.normal(each.shape) for each in given]


def by_rank(given):
    return [each / (2 + kc.replica().index) for each in given]


def applied_after(*steps, size=UNEVEN):
    """Applies in a last step what others have made of gradients."""
    model = kc.replicate(network(), MANY)
    optimizer = kc.replicate(keras.optimizers.SGD(0.1), MANY)
    weights = model.trainable_variables

    @kc.withdevices
    def made(x, y):
        with tf.GradientTape() as tape:
            loss = error(model, x, y)
        return steps[0](tape.gradient(loss, weights), x)

    found = made(*kc.split((X[:size], Y[:size]), MANY))
    for each in steps[1:]:
        found = kc.withdevices(each)(found)
    kc.withdevices(lambda given: optimizer.apply(given, weights))(found)
    return model


@pytest.mark.parametrize(
    "steps",
    [
        (weighted,),
        (reduced_in_a_function,),
        (weighted, halved),
    ],
)
def test_what_all_replicas_return_alike_may_be_applied(steps):
    kc.assert_in_sync(applied_after(*steps))


@pytest.mark.parametrize(
    "steps",
    [
        (own,),
        (lengths,),
        (by_length,),
        (of_one,),
        (weighted, beside_noise),
        (weighted, by_rank),
    ],
)
def test_what_each_replica_returns_of_its_own_may_not(steps):
    with pytest.warns(kc.ConfluxWarning, match=TOUCHED):
        model = applied_after(*steps)
    assert not kc.in_sync(model)


def test_a_metric_of_a_reduced_loss_counts_a_step_as_one():
    kept, other = kc.replicate(
        [keras.metrics.Mean(), keras.metrics.Mean("other")], MANY
    )

    @kc.withdevices
    def step(x):
        loss = kc.allreduce("mean", tf.reduce_mean(x), weight=len(x))
        kept.update_state(loss)
        other.update_state(x[:, 0], sample_weight=x[:, 0] ** 2)

    step(kc.split(X, MANY))  # warnings are errors
    assert float(kept.result()) == pytest.approx(X.mean(), rel=1e-5)


def test_a_tangent_passes_no_collective():
    x = tf.ones((2, 3))

    @kc.withdevices
    def step():
        with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
            y = kc.allreduce("mean", x)
        return accumulator.jvp(y)

    with pytest.raises(NotImplementedError, match=r"acc\.jvp\(y\)"):
        step()


def test_a_number_of_python_has_a_step_traced_anew():
    step = kc.withdevices(lambda x, n, training: x * n)
    with pytest.warns(kc.ConfluxWarning, match=r"`tf.constant\(0.4\)`") as told:
        list(map(lambda i: step(kc.split(X, MANY), i / 10, True), range(12)))
    assert len(told) == 1
    step = kc.withdevices(lambda x, n, training: x * n)
    for i in range(12):  # warnings are errors
        step(kc.split(X, MANY), tf.constant(i / 10), training=bool(i % 2))
        step(kc.split(X, MANY), 2, training=False)


def result_in_a_function(metric, x, y):
    return tf.function(lambda: result(metric, x, y))()


def result(metric, x, y):
    metric.update_state(x, y)
    return {"auc": metric.result(), "mean": tf.reduce_mean(x)}


def result_left_out(metric, x, y):
    return {"mean": result_in_a_function(metric, x, y)["mean"]}


RESULTS = [(result, 1), (result_in_a_function, 1), (result_left_out, 0)]


@pytest.mark.parametrize(("returned", "told"), RESULTS)
def test_the_result_of_a_metric_in_a_replica(returned, told):
    metric = kc.replicate(keras.metrics.AUC(), MANY)
    step = kc.withdevices(lambda x, y: returned(metric, x, y))
    rows = np.arange(EVEN, dtype="float32")[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        step(*kc.split((rows % 2, rows / EVEN), MANY))
    assert len(caught) == told
    assert all("Read it after the step" in str(x.message) for x in caught)


def write_own(model, x):
    for variable in model.trainable_variables:
        variable.assign_sub(0.1 * tf.reduce_mean(x) * variable)


def write_reduced(model, x):
    mean = kc.allreduce("mean", tf.reduce_mean(x), weight=len(x))
    for variable in model.trainable_variables:
        variable.assign_sub(0.1 * mean * variable)


def run_normalized(model, x):
    model(x, training=True)


def average(model, x):
    model(x, training=True)
    kc.allreduce("mean", model.non_trainable_weights, weight=len(x))


def run_in_a_function(model, x):
    tf.function(lambda: run_normalized(model, x))()


def run_by_a_function(model, x):
    tf.function(run_normalized)(model, x)


def write_in_a_loop(model, x):
    for _ in tf.range(3):
        mean = tf.reduce_mean(x)
        model.layers[1].moving_mean.assign_add(0.1 * mean * tf.ones(6))


WRITES = [
    write_own,
    run_normalized,
    run_in_a_function,
    run_by_a_function,
    write_in_a_loop,
]


@pytest.mark.parametrize("write", WRITES)
def test_copies_that_come_apart(write):
    model = kc.replicate(network(normalized=True), MANY)
    step = kc.withdevices(lambda x: write(model, x))
    with pytest.warns(kc.ConfluxWarning, match="copies come apart") as warned:
        step(kc.split(X, MANY))
    assert len(warned) == 1
    assert not kc.in_sync(model)


class Kept(keras.metrics.Metric):
    """A metric of one number, which it writes in some way."""

    def __init__(self, write):
        super().__init__()
        self.kept = self.add_variable((), "zeros", name="kept")
        self.write = write

    def update_state(self, x):
        self.write(self.kept, x)

    def result(self):
        return self.kept * 1.0


def keep_largest(kept, x):
    kept.assign(tf.maximum(kept.value, tf.reduce_max(x)))


def keep_last(kept, x):
    kept.assign(kc.allreduce("max", tf.reduce_max(x)))


def move(kept, x):
    kept.assign_add(0.1 * (tf.reduce_mean(x) - kept))


def add_and_reset(kept, x):
    kept.assign(0.0)
    kept.assign_add(tf.reduce_sum(x))
    kept.assign(tf.identity(kept.value) + 3 * tf.reduce_sum(x))
    kept.assign(2 * tf.reduce_sum(x) + kept - tf.reduce_sum(x))


def keep_largest_in_a_function(kept, x):
    tf.function(lambda: keep_largest(kept, x))()


@pytest.mark.parametrize(
    "write", [keep_largest, keep_last, move, keep_largest_in_a_function]
)
def test_copies_that_do_not_add_up(write):
    metric = kc.replicate(Kept(write), MANY)
    step = kc.withdevices(lambda x: metric.update_state(x))
    with pytest.warns(kc.ConfluxWarning, match="adds up the copies") as warned:
        step(kc.split(X, MANY))
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_each_metric_whose_copies_do_not_add_up_is_named():
    metrics = [kc.replicate(Kept(keep_last), MANY) for _ in range(2)]
    step = kc.withdevices(lambda x: [each.update_state(x) for each in metrics])
    with pytest.warns(kc.ConfluxWarning, match="adds up the copies") as warned:
        step(kc.split(X, MANY))
    assert len(warned) == 2


def test_a_variable_of_its_own_keeps_what_a_collective_returns():
    """As the warning says."""
    metric = Kept(keep_last)
    metric.kept = keras.Variable(0.0)
    kc.replicate(metric, MANY)
    kc.withdevices(lambda x: metric.update_state(x))(kc.split(X, MANY))
    assert float(metric.result()) == X.max()


def add_in_a_function(kept, x):
    tf.function(lambda: add_and_reset(kept, x))()


@pytest.mark.parametrize("write", [add_and_reset, add_in_a_function])
def test_copies_that_add_up(write):
    metric = kc.replicate(Kept(write), MANY)
    kc.withdevices(lambda x: metric.update_state(x))(kc.split(X, MANY))
    assert float(metric.result()) == pytest.approx(5 * X.sum(), rel=1e-4)


@pytest.mark.parametrize("first", ["zeros", "ones"])
def test_a_metric_that_is_built_in_a_step(first):
    class Built(Kept):
        def __init__(self):
            keras.metrics.Metric.__init__(self)
            self.kept = None

        def update_state(self, x):
            if self.kept is None:
                self.kept = self.add_variable((), first)
            self.kept.assign(self.kept + tf.reduce_sum(x))

    metric, alone = kc.replicate(Built(), MANY), Built()
    kc.withdevices(lambda x: metric.update_state(x))(kc.split(X, MANY))
    alone.update_state(X)
    assert float(metric.result()) == pytest.approx(float(alone.result()))


@pytest.mark.parametrize("write", [write_reduced, average])
def test_copies_that_stay_equal(write):
    model = kc.replicate(network(normalized=True), MANY)
    step = kc.withdevices(lambda x: write(model, x))
    step(kc.split(X, MANY))
    kc.assert_in_sync(model)


class Stepping(keras.Model):
    """Its step changes gradients by a function."""

    def __init__(self, change):
        super().__init__()
        self.inner = keras.layers.Dense(1)
        self.change = change

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        weights = self.trainable_variables
        gradients = self.change(tape.gradient(loss, weights))
        self.optimizer.apply(gradients, weights)
        samples = kc.allreduce("sum", tf.shape(x)[0])
        replicas = kc.allreduce("sum", 1.0)
        return {"loss": loss, "samples": samples, "replicas": replicas}


def fitted(change):
    keras.utils.set_random_seed(1)
    model = kc.replicate(Stepping(change), MANY)
    model.compile("sgd")
    model.fit(X, Y, batch_size=UNEVEN, verbose=0)


def test_gradients_that_are_the_whole_batch_s_already():
    with pytest.warns(kc.ConfluxWarning, match="leave the `allreduce` out"):
        fitted(lambda gradients: kc.allreduce("sum", gradients))
    fitted(lambda gradients: kc.allreduce("mean", gradients))


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("is_of_scope", [False, True])
def test_microbatches_are_for_fit(is_of_scope, turns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        if is_of_scope:
            with kc.replicate(devices=MANY, microbatches=turns):
                trained(weighted, devices=None)
        else:
            trained(weighted, microbatches=turns)
    said = "".join(str(warning.message) for warning in caught)
    told = f"`microbatches={turns}` has no effect in a loop of your own"
    assert said.count("microbatches") == said.count(told) == turns - 1


SHARDS = [None, "optimizer", "weights"]


@pytest.mark.parametrize(
    ("of_model", "of_scope"), [*itertools.product(SHARDS, SHARDS)][1:]
)
def test_a_model_and_an_optimizer_of_other_options(of_model, of_scope):
    """Each is named by its own, and a scope that has an option is advised."""
    scope = kc.replicate(devices=MANY, shard=of_scope)
    with pytest.raises(kc.StrategyError) as raised:
        trained(weighted, shard=of_model, scope=scope)
    said = str(raised.value)
    for shard in {
        of_model,
        of_scope,
        None if of_model == of_scope else of_model,
    }:
        option = "" if shard is None else f", shard={shard!r}"
        assert f":{MANY - 1}]{option})" in said


def test_arrays_in_place_of_batches():
    with pytest.raises(ValueError, match=r"from_tensor_slices\(\(x, y\)\)"):
        kc.distribute((X, Y), MANY)
    with pytest.raises(TypeError, match=r"`kc\.split\(\(x, y\)\)`"):
        kc.split(X, Y)
    with pytest.raises(TypeError, match=r"write `losses\[0\]`"):
        sum([kc.split(X, MANY)], 0.0)


def applied(way, reduce):
    """Trains once, and applies gradients in a function inside of the step."""
    model = network()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    kc.replicate((model, optimizer), MANY)
    steps = kc.replicate(keras.metrics.Sum(), MANY)

    def apply(gradients):
        optimizer.apply(gradients, model.trainable_variables)
        steps.update_state(1)

    def gradients(x):
        with tf.GradientTape() as tape:
            dropped = keras.random.dropout(model(x), 0.5)
            loss = tf.reduce_mean(dropped**2)
        return reduce(tape.gradient(loss, model.trainable_variables), x)

    def in_one(x):
        tf.function(lambda: apply(gradients(x)))()

    def in_two(x):
        tf.function(apply)(gradients(x))

    kc.withdevices({"one": in_one, "two": in_two}[way])(kc.split(X, MANY))
    return model


@pytest.mark.parametrize("way", ["one", "two"])
def test_gradients_that_a_function_applies(way):
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        assert kc.in_sync(applied(way, weighted))
    with pytest.warns(kc.ConfluxWarning, match="replicas|replica writes"):
        applied(way, lambda gradients, x: gradients)


def mean_of_losses(metric, y, p):
    metric.update_state(tf.reduce_mean((y - p) ** 2))


def weighted_mean_of_losses(metric, y, p):
    metric.update_state(tf.reduce_mean((y - p) ** 2), sample_weight=len(y))


def mean_of_rows(metric, y, p):
    metric.update_state((y - p) ** 2)


@pytest.mark.parametrize(
    ("update", "count", "warns"),
    [
        (mean_of_losses, UNEVEN, True),
        (mean_of_losses, EVEN, False),
        (weighted_mean_of_losses, UNEVEN, False),
        (mean_of_rows, UNEVEN, False),
    ],
)
def test_a_metric_of_the_losses_of_uneven_parts(update, count, warns):
    metric = kc.replicate(keras.metrics.Mean(), MANY)

    @kc.withdevices
    def step(y, p):
        update(metric, y, p)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        step(*kc.split((Y[:count], X[:count, :1]), MANY))
    assert [COUNTS in str(each.message) for each in caught] == [True] * warns
    alone = float(np.mean((Y[:count] - X[:count, :1]) ** 2))
    assert (float(metric.result()) != pytest.approx(alone, rel=1e-5)) == warns
