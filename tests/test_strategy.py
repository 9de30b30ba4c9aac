"""The strategy, as `tf.distribute` documents one, in one process."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import several
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc

X, Y = regression(64)
TOTAL = MANY * (MANY + 1) / 2
AGGREGATION = tf.VariableAggregation
pytestmark = several


@pytest.fixture(scope="module")
def strategy():
    return kc.replicate(devices=MANY)


def rank():
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32)


def number():
    """What each replica has: 1, 2 and so on."""
    return rank() + 1


def local(strategy, value):
    found = strategy.experimental_local_results(value)
    return [np.asarray(each).tolist() for each in found]


def made(strategy, *args, **options):
    with strategy.scope():
        return tf.Variable(*args, **options)


def ran(strategy, program, *args):
    """Returns what replicas return that run in a `tf.function`."""
    return tf.function(lambda *given: strategy.run(program, given))(*args)


def test_values_are_reduced_to_the_devices_of_a_variable(strategy):
    variable = made(strategy, 0.0)  # whose truth value is false
    parts = strategy.run(number)
    extended = strategy.extended
    found = extended.reduce_to("SUM", parts, destinations=variable)
    assert local(strategy, found) == [TOTAL] * MANY
    pairs = [(parts, variable), (parts, parts)]
    for found in extended.batch_reduce_to("MEAN", pairs):
        assert local(strategy, found) == [TOTAL / MANY] * MANY
    found = extended.broadcast_to(tf.constant(2.0), variable)
    assert local(strategy, found) == [2.0] * MANY
    assert bool(variable) is False


def test_an_optimizer_of_tensorflow_1_updates_variables(strategy):
    variable = made(strategy, 1.0)
    with strategy.scope():
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = number() * variable
        gradient = tape.gradient(loss, variable)
        optimizer.apply_gradients([(gradient, variable)])

    ran(strategy, step)
    assert local(strategy, variable) == [1 - TOTAL] * MANY


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        (lambda tree: kc.allreduce("sum", tree), [TOTAL] * MANY),
        (lambda tree: kc.reduce("max", tree), [MANY, *range(2, MANY + 1)]),
        (lambda tree: kc.broadcast(tree, root=1), [2.0] * MANY),
        (
            lambda tree: kc.allgather(tree),
            [[float(i + 1) for i in range(MANY)]] * MANY,
        ),
    ],
)
def test_verbs_take_and_return_what_a_strategy_runs(strategy, verb, expected):
    with strategy.scope():
        tree = strategy.run(lambda: [number(), {"a": number(), "b": None}])
        found = verb(tree)
        assert [np.asarray(each).tolist() for each in found[0]] == expected
        assert [*found[1]] == ["a", "b"]
        assert found[1]["b"] is None
        again = strategy.run(lambda each: each[1]["a"] + 0.0, (found,))
    assert local(strategy, again) == expected


def test_gradients_of_run_are_reduced_and_applied(strategy):
    model = kc.replicate(dense(), devices=MANY)
    optimizer = kc.replicate(keras.optimizers.SGD(0.1), devices=MANY)
    alone = dense()

    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    found = ran(strategy, gradients, *kc.split((X[:63], Y[:63]), devices=MANY))
    sizes = [len(part) for part in kc.split(X[:63], devices=MANY)]
    with strategy.scope():
        means = kc.allreduce("mean", found, weight=sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of replicas that drift apart
        update = kc.withdevices(
            lambda means: optimizer.apply(means, model.trainable_variables)
        )
        update(means)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((alone(X[:63]) - Y[:63]) ** 2)
    weights = alone.trainable_variables
    keras.optimizers.SGD(0.1).apply(tape.gradient(loss, weights), weights)
    assert_same_training(alone, kc.unreplicate(model))


def test_a_list_with_a_tree_for_each_device(strategy):
    trees = [{"w": np.float32(i + 1)} for i in range(MANY)]
    with strategy.scope():
        found = kc.allreduce(tf.distribute.ReduceOp.SUM, trees)
        assert isinstance(found, kc.Replicas)
        assert [float(each["w"]) for each in found] == [TOTAL] * MANY
        mean = kc.allreduce(tf.distribute.ReduceOp.MEAN, trees)
        assert float(mean[0]["w"]) == TOTAL / MANY
        weights = [1.0] + [0.0] * (MANY - 1)
        first = kc.allreduce("mean", trees, weight=weights)
        assert float(first[0]["w"]) == 1
        with pytest.raises(kc.StrategyError, match="in a list"):
            kc.allreduce("sum", trees[1:])
        variables = [tf.Variable(0.0) for _ in range(MANY)]
        with pytest.raises(kc.StrategyError, match="single list"):
            kc.allreduce("sum", variables)  # each of which has copies


def test_leaves_on_other_devices_are_refused(strategy):
    leaves = [kc.Replicas([1.0] * n, n) for n in (MANY, MANY - 1)]
    if MANY > 2:
        with pytest.raises(kc.StrategyError, match="the same devices"):
            kc.allreduce("sum", leaves)


def test_on_one_device_a_tree_is_what_run_returns():
    with kc.replicate(devices=1) as strategy:
        found = kc.allreduce("mean", strategy.run(lambda: [number(), None]))
        assert float(found[0][0]) == 1
        assert found[1] is None


def test_replicas_are_what_a_strategy_takes(strategy):
    parts = kc.Replicas([float(i + 1) for i in range(MANY)], MANY)
    assert isinstance(parts, tf.distribute.DistributedValues)
    assert local(strategy, parts) == [*parts]
    assert float(strategy.reduce("SUM", parts, axis=None)) == TOTAL
    assert local(strategy, strategy.run(lambda x: x + 0.0, (parts,))) == [
        *parts
    ]
    rows = kc.Replicas([[float(i)] for i in range(MANY)], MANY)
    tensors = kc.Replicas([tf.constant(row) for row in rows], MANY)
    joined = strategy.gather(tensors, axis=0)
    assert np.asarray(joined).tolist() == [float(i) for i in range(MANY)]
    trees = kc.Replicas(
        [{"a": float(i + 1), "b": [2.0]} for i in range(MANY)], MANY
    )
    found = ran(strategy, lambda tree: tree["a"] + tree["b"][0], trees)
    assert local(strategy, found) == [i + 3.0 for i in range(MANY)]
    found = strategy.reduce("MEAN", trees, axis=None)
    assert float(found["a"]) == TOTAL / MANY
    inside = tf.function(lambda each: (each[0] + each[1], each.devices))
    assert float(inside(parts)[0]) == 3
    assert [*parts, *parts[1:]] == [
        *map(float, [*range(1, MANY + 1), *range(2, MANY + 1)])
    ]
    assert 2.0 in parts
    with pytest.raises(ValueError, match="inside a replica context"):
        tf.convert_to_tensor(parts)


@pytest.mark.parametrize("traced", [True, False])
def test_only_the_first_replica_writes(strategy, traced):
    run = ran if traced else lambda strategy, *each: strategy.run(*each)
    first = AGGREGATION.ONLY_FIRST_REPLICA
    variable = made(strategy, 5.0, aggregation=first)
    run(strategy, lambda: variable.assign(number()))
    assert local(strategy, variable) == [1.0] * MANY
    run(strategy, lambda: variable.assign_add(number()))
    assert local(strategy, variable) == [2.0] * MANY
    with strategy.scope():
        made_by_keras = keras.Variable(0.0, aggregation="only_first_replica")
    run(strategy, lambda: made_by_keras.assign(number()))
    assert local(strategy, made_by_keras.value) == [1.0] * MANY
    rows = made(strategy, [[0.0], [0.0]], aggregation=first)

    def scatter():
        row = tf.reshape(number(), [1, 1])
        rows.scatter_update(tf.IndexedSlices(row, tf.constant([1]), [2, 1]))

    run(strategy, scatter)
    assert local(strategy, rows) == [[[0.0], [1.0]]] * MANY


def test_only_the_first_replica_is_read(strategy):
    on_read = tf.VariableSynchronization.ON_READ
    variable = made(
        strategy,
        0.0,
        synchronization=on_read,
        aggregation=AGGREGATION.ONLY_FIRST_REPLICA,
    )
    ran(strategy, lambda: variable.assign(number()))
    assert float(variable.read_value()) == 1


def test_a_count_of_steps_needs_no_collective(strategy):
    with strategy.scope():
        weight = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    def step():
        optimizer.apply([tf.ones([1])], [weight])

    program = tf.function(lambda: strategy.run(step))
    program()
    assert int(optimizer.iterations) == 1
    graph = program.get_concrete_function().graph
    found = [each.type for each in graph.get_operations()]
    assert sum("CollectiveReduce" in each for each in found) <= MANY


def test_clipping_acts_on_the_sum(strategy):
    with strategy.scope():
        weight = keras.Variable([0.0, 0.0])
        optimizer = keras.optimizers.SGD(1.0, clipnorm=1.0)
        optimizer.build([weight])

    def step():
        optimizer.apply([number() * tf.constant([3.0, 4.0])], [weight])

    ran(strategy, step)
    np.testing.assert_allclose(weight.numpy(), [-0.6, -0.8], rtol=1e-6)


def test_a_loop_that_reduces_between_steps_does_not_warn(strategy):
    model = kc.replicate(dense(), devices=MANY)
    optimizer = kc.replicate(keras.optimizers.SGD(0.1), devices=MANY)

    @kc.withdevices
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    @kc.withdevices
    def update(grads):
        grads = [tf.clip_by_norm(each, 1.0) for each in grads]
        optimizer.apply(grads, model.trainable_variables)

    found = gradients(*kc.split((X, Y), devices=MANY))
    sizes = kc.withdevices(len)(kc.split(X, devices=MANY))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(kc.allreduce("mean", found, weight=sizes))
        update(kc.allreduce("sum", *found))
    kc.assert_in_sync(model)
    one_has_it = kc.reduce("sum", found, root=1)

    @kc.withdevices
    def update_one(grads):
        if kc.replica().index == 1:
            optimizer.apply(grads, model.trainable_variables)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_one(one_has_it)
    kc.synchronize(model, root=1)
    for not_reduced in (found, one_has_it):
        other = kc.withdevices(lambda given: update.__wrapped__(given))
        with pytest.warns(kc.ConfluxWarning, match="about to drift apart"):
            other(not_reduced)


def test_a_mean_over_parts_of_different_sizes_warns_once(strategy):
    def averaged(x):
        return kc.allreduce("mean", tf.reduce_mean(x))

    for count, told in ((2 * MANY, 0), (2 * MANY + 1, 1)):
        run = kc.withdevices(averaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                run(kc.split(X[:count], devices=MANY))
        found = [
            each for each in caught if "weight=len(x)" in str(each.message)
        ]
        assert len(found) == told

    @kc.withdevices
    def weighted(x):
        return kc.allreduce("mean", tf.reduce_mean(x), weight=len(x))

    parts = kc.split(X[: 2 * MANY + 1], devices=MANY)
    means = kc.withdevices(tf.reduce_mean)(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = weighted(parts)
    np.testing.assert_allclose(found[0], X[: 2 * MANY + 1].mean(), rtol=1e-5)
    with pytest.warns(
        kc.ConfluxWarning, match=r"allreduce\('mean'\): .*weight"
    ):
        kc.allreduce("mean", means)


class _Recorded(tf.distribute.ReductionToOneDevice):
    def __init__(self):
        super().__init__()
        self.seen = []

    def reduce_implementation(self, *args, **options):
        self.seen.append("reduce")
        return super().reduce_implementation(*args, **options)

    def batch_reduce_implementation(self, *args, **options):
        self.seen.append("batch")
        return super().batch_reduce_implementation(*args, **options)


@pytest.mark.parametrize("make", [kc.replicate, kc.ReplicatedStrategy])
def test_cross_device_ops_are_those_given(make):
    given = _Recorded()
    strategy = make(devices=MANY, cross_device_ops=given)
    parts = strategy.run(number)
    assert float(strategy.reduce("SUM", parts, axis=None)) == TOTAL
    strategy.extended.batch_reduce_to("SUM", [(parts, parts)])
    assert "reduce" in given.seen
    assert "batch" in given.seen
    assert kc.replicate(devices=MANY) is not strategy


@pytest.mark.parametrize(
    "make",
    [
        tf.distribute.NcclAllReduce,
        tf.distribute.HierarchicalCopyAllReduce,
        tf.distribute.ReductionToOneDevice,
    ],
)
def test_any_cross_device_ops_reduce(make):
    strategy = kc.ReplicatedStrategy(MANY, cross_device_ops=make())
    for dtype in (tf.float32, tf.int32, tf.int64):
        parts = strategy.run(lambda dtype=dtype: tf.cast(number(), dtype))
        assert float(strategy.reduce("SUM", parts, axis=None)) == TOTAL


def test_groups_of_copies_leave_out_no_device():
    given = tf.distribute.HierarchicalCopyAllReduce()
    strategy = kc.ReplicatedStrategy(MANY, cross_device_ops=given)
    parts = strategy.run(number)
    (found,) = strategy.extended.batch_reduce_to("SUM", [(parts, parts)])
    assert local(strategy, found) == [TOTAL] * MANY


def test_cross_device_ops_belong_to_a_strategy():
    given = tf.distribute.ReductionToOneDevice()
    with pytest.raises(TypeError, match="belongs to a strategy"):
        kc.replicate(dense(), cross_device_ops=given)


def test_a_function_of_other_devices_runs_in_a_scope(strategy):
    with strategy.scope():
        found = kc.withdevices(lambda: kc.replica().index, devices=1)()
        assert [int(each) for each in found] == [0]
        assert tf.distribute.get_strategy() is strategy


def test_copies_of_a_model_by_device(strategy):
    model = kc.replicate(dense(), devices=MANY)
    copies = kc.Replicas.from_distributed(model)
    assert len(copies) == MANY
    for index, device in enumerate(copies.devices):
        for weight in model.weights:
            copy = copies[index][weight.path]
            assert copy.device.endswith(device)
            np.testing.assert_array_equal(copy, weight)
