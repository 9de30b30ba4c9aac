"""A `tf.Variable` that a step writes is warned of where it goes wrong."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY

import keras_conflux as kc

pytestmark = pytest.mark.skipif(MANY < 3, reason="needs three devices")

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")


class Writes(keras.layers.Layer):
    """Writes a variable of TensorFlow's own."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.mine = tf.Variable([0.5, 0.5], trainable=False, name="mine")
        self.weight = self.add_weight(shape=(2,), trainable=False)
        self.generator = tf.random.Generator.from_seed(1)
        self.table = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.float32, 0.0
        )

        self.fixed = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer([1], [2.0]), 0.0
        )
        self.queue = tf.queue.FIFOQueue(100, tf.int32, ())
        self.batches = iter(tf.data.Dataset.range(1000))

    def call(self, x):
        self.write(self, x)
        return x


class InStep(keras.Sequential):
    """Writes it in its own `train_step`."""

    def train_step(self, data):
        self.layers[0].mine.assign_add([1.0, 1.0])
        return super().train_step(data)


class Exchanges(keras.Sequential):
    """Exchanges tensors in a branch, which counts the exchanges."""

    def train_step(self, data):
        def total():
            return kc.allreduce("sum", tf.reduce_sum(data[0]))

        tf.cond(total() > 0, total, lambda: 0.0)
        return super().train_step(data)


class InMetric(keras.metrics.Mean):
    """Writes it in a metric."""

    def __init__(self):
        super().__init__()
        self.mine = tf.Variable([0.5, 0.5], trainable=False, name="mine")

    def update_state(self, y, predicted, sample_weight=None):
        self.mine.assign_add([1.0, 1.0])
        return super().update_state(predicted)


def _nothing(layer, x):
    pass


def _adds(layer, x):
    layer.mine.assign_add([1.0, 1.0])


def _subtracts_samples(layer, x):
    layer.mine.assign_sub(tf.reduce_mean(x[:, :2], 0))


def _sets(layer, x):
    layer.mine.assign(tf.reduce_max(x[:, :2], 0))


def _sets_what_it_was(layer, x):
    layer.mine.assign(layer.mine * 0.5)


def _scatters(layer, x):
    layer.mine.scatter_add(tf.IndexedSlices([1.0], [0]))


def _sets_a_slice(layer, x):
    layer.mine[:1].assign([1.0] * tf.reduce_sum(x))


def _in_a_branch(layer, x):
    tf.cond(
        tf.reduce_sum(x) > -1e9,
        lambda: layer.mine.assign_add([1.0, 1.0]),
        lambda: layer.mine.value(),
    )


def _in_a_loop(layer, x):
    tf.while_loop(
        lambda i: i < 3,
        lambda i: (
            i + tf.cast(layer.mine.assign_add([1.0, 1.0])[0] > 0, "int32"),
        ),
        [0],
    )


def _in_a_function(layer, x):
    @tf.function
    def add():
        layer.mine.assign_add([1.0, 1.0])

    add()


def _draws(layer, x):
    layer.generator.normal([2])


def _fills_a_table(layer, x):
    layer.table.insert(tf.constant([1], tf.int64), [1.0])


def _looks_up(layer, x):
    layer.fixed.lookup(tf.constant([1]))


def _counts_in_a_table(layer, x):
    key = tf.constant([1], tf.int64)
    layer.table.insert(key, layer.table.lookup(key) + 1.0)


def _fills_a_queue(layer, x):
    layer.queue.enqueue(1)


def _draws_a_batch(layer, x):
    next(layer.batches)


def _adds_what_is_random(layer, x):
    layer.mine.assign_add(tf.random.normal([2]))


WRONG = {
    "adds": _adds,
    "subtracts samples": _subtracts_samples,
    "sets": _sets,
    "sets what it was": _sets_what_it_was,
    "scatters": _scatters,
    "sets a slice": _sets_a_slice,
    "in a branch": _in_a_branch,
    "in a loop": _in_a_loop,
    "in a function": _in_a_function,
}
RIGHT = {
    "nothing": _nothing,
    "fills a table": _fills_a_table,
    "looks up": _looks_up,
}
SHARED = {
    "LookupTableInsertV2": _counts_in_a_table,
    "QueueEnqueueV2": _fills_a_queue,
    "IteratorGetNext": _draws_a_batch,
}
# Of a variable with a copy on each device.
WRONG_IN_COPIES = {
    "subtracts samples": _subtracts_samples,
    "adds what is random": _adds_what_is_random,
    "in a branch": _in_a_branch,
}
RIGHT_IN_COPIES = {
    "adds": _adds,
    "scatters": _scatters,
    "in a function": _in_a_function,
    "sets what it was": _sets_what_it_was,
}


# Of what `add_weight` has made, by methods of its value.
BY_VALUE = {
    "sets": lambda layer, x: layer.weight.value.assign(
        tf.reduce_mean(x[:, :2], 0)
    ),
    "scatters": lambda layer, x: layer.weight.value.scatter_add(
        tf.IndexedSlices(x[:, 0], tf.cast(x[:, 1] > 0, tf.int32))
    ),
    "in a branch": lambda layer, x: tf.cond(
        tf.reduce_sum(x) > -1e9,
        lambda: layer.weight.value.assign_add(x[0, :2]),
        lambda: layer.weight.value.value(),
    ),
}


def model_that(write, kind=keras.Sequential, metric=None):
    model = kind([keras.Input((4,)), Writes(write), keras.layers.Dense(4)])
    model.compile("sgd", "mse", metrics=[metric] if metric else None)
    return model


def fit(model, **options):
    model.fit(X, X, batch_size=6, verbose=0, **options)
    return model.layers[0]


def of_copies(write):
    with kc.replicate(devices=2).scope():
        return model_that(write)


warns = functools.partial(
    pytest.warns, kc.ConfluxWarning, match="`tf.Variable` 'mine:0' of shape "
)


def quick(cases, names):
    """Returns the cases, of which only some are for a quick run."""
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.long)
        for name in cases
    ]


@pytest.mark.parametrize(
    "write", quick(WRONG, ("adds", "sets", "in a branch", "in a loop"))
)
def test_each_replica_writes_what_there_is_once(write):
    model = kc.replicate(model_that(WRONG[write]), 2)
    with warns() as caught:
        fit(model, epochs=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("write", quick(RIGHT, ("nothing", "looks up")))
def test_what_all_set_alike_is_right(write):
    one = fit(model_that(RIGHT[write]))
    many = fit(kc.replicate(model_that(RIGHT[write]), 2))
    np.testing.assert_array_equal(many.mine, one.mine)


@pytest.mark.parametrize(
    "write", quick(WRONG_IN_COPIES, ("subtracts samples",))
)
def test_copies_that_come_apart(write):
    model = of_copies(WRONG_IN_COPIES[write])
    with warns():
        fit(model)


@pytest.mark.parametrize("write", quick(RIGHT_IN_COPIES, ("adds",)))
def test_copies_that_stay_equal(write):
    one, many = (
        model_that(RIGHT_IN_COPIES[write]),
        of_copies(RIGHT_IN_COPIES[write]),
    )
    one, many = fit(one), fit(many)
    for copy in many.mine.values:
        np.testing.assert_array_equal(copy, one.mine)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_each_call_warns(call):
    model = kc.replicate(model_that(_adds), 2)
    data = (X,) if call == "predict" else (X, X)
    with warns():
        getattr(model, call)(*data, batch_size=6, verbose=0)


def test_a_train_step():
    model = kc.replicate(model_that(_nothing, InStep), 2)
    with warns():
        fit(model)


def test_a_metric():
    model = kc.replicate(model_that(_nothing, metric=InMetric()), 2)
    with warns():
        fit(model)


def test_a_generator():
    model = kc.replicate(model_that(_draws), 2)
    with pytest.warns(kc.ConfluxWarning, match="Draw by `keras.random` with"):
        fit(model)


@pytest.mark.parametrize("kind", SHARED)
def test_what_each_replica_changes_and_one_device_once(kind):
    model = kc.replicate(model_that(SHARED[kind]), 2)
    with pytest.warns(kc.ConfluxWarning, match=f"runs `{kind}`") as caught:
        fit(model, epochs=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", [*SHARED, "looks up", "adds"])
def test_functions_that_would_wait_for_each_other_are_refused(kind):
    held = keras.Variable(0.0, trainable=False)

    @tf.function
    def change(layer, x):
        (SHARED | WRONG | RIGHT)[kind](layer, x)
        held.assign(tf.reduce_mean(x))

    model = kc.replicate(model_that(change), 2)
    with pytest.raises(kc.StrategyError, match=r"Leave out `tf\.function`"):
        fit(model)


def test_a_step_that_is_traced_for_a_number_of_samples():
    def adds_rows(layer, x):
        layer.mine.assign_add([x.shape[0] / 1.0 for _ in range(2)])

    model = kc.replicate(keras.Sequential([Writes(adds_rows)]), 3)
    model.compile("sgd", "mse")
    of_the_graph = pytest.warns(kc.ConfluxWarning, match="no graph shows")
    with warns(), of_the_graph:
        fit(model)


def test_what_the_package_counts_is_left_out():
    fit(kc.replicate(model_that(_nothing, Exchanges), 2))


def test_one_replica_is_one_device():
    fit(kc.replicate(model_that(_adds), 1))


@pytest.mark.parametrize("name", BY_VALUE)
def test_what_is_written_by_a_value_warns(name):
    model = model_that(BY_VALUE[name])
    kc.replicate(model, 2)
    with pytest.warns(kc.ConfluxWarning, match="by methods of its `value`"):
        fit(model)


def test_a_value_that_is_equal_does_not_warn():
    model = model_that(lambda layer, x: layer.weight.value.assign([1.0, 2.0]))
    kc.replicate(model, 2)
    np.testing.assert_array_equal(fit(model).weight, [1.0, 2.0])


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_a_step_of_a_loop_warns_of_what_its_replicas_share(kind):
    shared = kind(0.0, name="mine")
    step = kc.withdevices(lambda x: shared.assign_add(x), devices=2)
    with pytest.warns(
        kc.ConfluxWarning,
        match="writes 'mine:0'.* has one. .* `keras_conflux.replicate.metric.`",
    ) as caught:
        list(map(step, (1.0, 2)))  # which is traced anew
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_what_each_replica_is_given_does_not_warn_in_a_loop():
    given = kc.replicate([tf.Variable(1.0), keras.Variable(1.0)], devices=2)

    @kc.withdevices
    def step(given):
        for each in given:
            each.assign_add(kc.replica().index + 1.0)

    step(given)
    assert [[*map(float, each)] for each in given] == [[2, 2], [3, 3]]


def test_what_each_replica_is_given_is_no_variable_in_a_step():
    given = kc.replicate(keras.Variable(1.0), devices=2)
    step = kc.withdevices(lambda x: given.assign_add(x), devices=2)
    with pytest.raises(AttributeError, match="which a step may assign, write"):
        step(1.0)


def test_a_seed_generator_has_copies():
    generator = keras.random.SeedGenerator(1)
    assert kc.replicate(generator, 2) is generator
    step = kc.withdevices(
        lambda: keras.random.normal((2,), seed=generator), devices=2
    )
    step(), step()
    kc.assert_in_sync(generator)
    assert int(kc.unreplicate(generator).state[1]) == 2


def test_copies_and_what_is_read_do_not_warn_in_a_loop():
    copies = kc.replicate(lambda: tf.Variable(0.0))
    shared, made = tf.Variable(1.0), []

    @kc.withdevices
    def step():
        if not made:
            made.append(tf.Variable(0.0))
        return copies.assign_add(shared) + made[0].assign_add(shared)

    assert {float(each) for each in step()} == {2}
    alone = kc.withdevices(lambda: shared.assign_add(1.0) + 0, devices=1)
    assert float(alone()[0]) == 2
