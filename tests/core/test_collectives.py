"""The collectives against numpy."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import COUNTS
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from hypothesis import assume
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc
from keras_conflux._communication import dtypes
from keras_conflux._communication.buckets import map_buckets
from keras_conflux._communication.communicator import Communicator
from keras_conflux._communication.transports import ops
from keras_conflux._communication.transports.in_graph import CpuRing
from keras_conflux._communication.transports.xla import XlaNccl
from keras_conflux._communication.tree_collectives import ReplicaCollectives
from keras_conflux._compat import cross_device
from keras_conflux._replication import steps

OPS = {
    "sum": np.sum,
    "mean": np.mean,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
}
DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (17,)]


@st.composite
def replica_trees(draw):
    """A structure with a dtype and shape a leaf, and values a replica."""
    leaf = st.one_of(
        st.none(), st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES))
    )
    tree = draw(
        st.one_of(
            leaf.filter(lambda value: value is not None),
            st.lists(leaf, min_size=1, max_size=4),
            st.dictionaries(st.sampled_from("abc"), leaf, min_size=1),
            st.fixed_dictionaries({"a": st.lists(leaf, max_size=2), "b": leaf}),
        )
    )
    assume(keras.tree.flatten(tree))
    return tree, draw(st.integers(0, 2**16))


@pytest.mark.parametrize("tree", [[], {"a": []}])
def test_a_tree_without_leaves_is_refused(tree):
    with pytest.raises(ValueError, match="has no leaves"):
        kc.allreduce("sum", kc.Replicas([tree] * MANY, MANY))


def _is_spec(value):
    return value is None or (isinstance(value, tuple) and len(value) == 2)


def _values(spec, rng):
    """Fills a tree of (dtype, shape) with numbers that ops keep exact-ish."""
    if spec is None:
        return None
    if _is_spec(spec):
        dtype, shape = spec
        if dtype.startswith("int"):
            return tf.constant(rng.integers(-4, 5, shape), dtype)
        return tf.constant(rng.uniform(-2, 2, shape), dtype)
    if isinstance(spec, dict):
        return {key: _values(value, rng) for key, value in spec.items()}
    return [_values(value, rng) for value in spec]


def _expected(op, leaves):
    wide = [np.asarray(tf.cast(leaf, tf.float64)) for leaf in leaves]
    return OPS[op](np.stack(wide), axis=0)


def _assert_reduced(op, trees, results):
    for result in results:
        keras.tree.assert_same_structure(trees[0], result)
        got = keras.tree.flatten(result)
        leaves = zip(*map(keras.tree.flatten, trees), strict=True)
        for got_leaf, replica_leaves in zip(got, leaves, strict=True):
            first = replica_leaves[0]
            if first is None:
                assert got_leaf is None
                continue
            if op == "mean" and not first.dtype.is_floating:
                assert got_leaf.dtype == keras.config.floatx()
            else:
                assert got_leaf.dtype == first.dtype
            assert got_leaf.shape == first.shape
            # One rounding a step of the reduction, of values of at most 2
            # (sum) or 2 ** replicas (product).
            eps = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 2**-52}
            tolerance = 20 * eps.get(got_leaf.dtype.name, 2**-23)
            np.testing.assert_allclose(
                np.asarray(tf.cast(got_leaf, tf.float64)),
                _expected(op, replica_leaves),
                rtol=tolerance,
                atol=tolerance,
            )


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@given(
    case=replica_trees(),
    op=st.sampled_from(sorted(OPS)),
    count=st.sampled_from(COUNTS),
)
def test_allreduce_is_numpy(inside, case, op, count):
    spec, seed = case
    rng = np.random.default_rng(seed)
    trees = [_values(spec, rng) for _ in range(count)]

    def reduce(tree):
        return kc.allreduce(op, tree)

    run = kc.withdevices(reduce) if inside else reduce
    results = run(kc.Replicas(trees, count))
    assert results.devices == DEVICES[:count]
    _assert_reduced(op, trees, results)


@several
def test_trees_one_after_another():
    trees = [{"a": np.float32(i), "b": None} for i in range(1, MANY + 1)]
    results = kc.allreduce("+", *trees)
    assert [float(r["a"]) for r in results] == [sum(range(1, MANY + 1))] * MANY
    assert [r["b"] for r in results] == [None] * MANY


def test_indexed_slices_stay_sparse_and_may_be_uneven(count):
    def slices(index):
        rows = index + 1
        return tf.IndexedSlices(
            values=tf.fill([rows, 2], float(index + 1)),
            indices=tf.range(rows),
            dense_shape=tf.constant([5, 2]),
        )

    dense = [tf.convert_to_tensor(slices(index)) for index in range(count)]
    for op, total in (("sum", sum(dense)), ("mean", sum(dense) / count)):

        @kc.withdevices(devices=count)
        def reduced(op=op):
            mine = [slices(index) for index in range(count)]
            tree = {"s": mine[kc.replica().index], "d": tf.ones(2)}
            result = kc.allreduce(op, tree)
            assert isinstance(result["s"], tf.IndexedSlices)
            return tf.convert_to_tensor(result["s"])

        for value in reduced():
            np.testing.assert_allclose(value, total, rtol=1e-6)
    if count > 1:
        with pytest.raises(ValueError, match="IndexedSlices"):
            kc.withdevices(
                lambda: kc.allreduce("max", slices(0)), devices=count
            )()
        with pytest.raises(TypeError, match="broadcast takes no"):
            kc.withdevices(lambda: kc.broadcast(slices(0)), devices=count)()


@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", tf.int32), ("mean", tf.float32)]
)
def test_indexed_slices_of_integers(op, dtype, count):
    @kc.withdevices(devices=count)
    def reduced():
        slices = tf.IndexedSlices(tf.constant([[6, 12]]), tf.constant([1]))
        result = kc.allreduce(op, slices)
        assert result.dtype == dtype
        return tf.reduce_sum(result.values, 0)

    expected = np.array([6, 12]) * (count if op == "sum" else 1)
    for value in reduced():
        np.testing.assert_array_equal(value, expected)


WEIGHTS = {
    "of samples": np.ones(2, "float32"),
    "with an axis": tf.ones([1]),
    "a list": [1.0],
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_a_weight_is_one_number(weight):
    @kc.withdevices(devices=MANY)
    def inside():
        return kc.allreduce("mean", tf.constant(1.0), weight=weight)

    with pytest.raises(ValueError, match="`weight` is one number per replica"):
        inside()
    with pytest.raises(ValueError, match="`weight` is one number per replica"):
        kc.allreduce(
            "mean",
            kc.Replicas([1.0] * MANY, MANY),
            weight=kc.Replicas([np.asarray(weight)] * MANY, MANY),
        )


@several
def test_one_weight_for_several_replicas_is_refused():
    x = kc.split(np.float32([1, 2, 6]), 2)
    means = kc.withdevices(tf.reduce_mean)(x)
    weights = [len(part) for part in x]
    kc.allreduce("mean", kc.Replicas([1.0, 2.0], 2))  # warns of no later one
    assert float(kc.allreduce("mean", means, weight=weights)[0]) == 3
    told = re.escape("write `weight=[len(part) for part in x]`")
    with pytest.raises(ValueError, match=told):
        kc.allreduce("mean", means, weight=len(x))
    with pytest.raises(ValueError, match=told):
        kc.allreduce("mean", kc.replicate(dense(), 2), weight=tf.constant(2))
    with pytest.raises(TypeError, match=re.escape("len(part) for part in x")):
        float(means)


@pytest.mark.parametrize("inside", [False, True])
def test_weighted_mean_ignores_nan_of_weight_zero(count, inside):
    def mean(value, weight):
        return kc.allreduce("mean", value, weight=weight)

    def assert_mean(values, weights, expected):
        run = kc.withdevices(mean) if inside else mean
        results = run(kc.Replicas(values, count), kc.Replicas(weights, count))
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-6)

    values = [tf.constant([float(i), 1.0]) for i in range(count)]
    weights = [float(i) for i in range(1, count + 1)]
    assert_mean(values, weights, np.average(values, 0, weights))
    if count > 1:
        expected = np.average(values[1:], 0, weights[1:])
        values[0], weights[0] = tf.constant([np.nan, np.inf]), 0.0
        assert_mean(values, weights, expected)


def test_many_tensors_travel_in_buckets(count):
    shapes = [(n, 3) for n in range(1, 40)]
    trees = [
        [
            tf.fill(shape, tf.cast(index + 1, dtype))
            for shape in shapes
            for dtype in ("float32", "int32")
        ]
        for index in range(count)
    ]
    for result in kc.allreduce("sum", kc.Replicas(trees, count)):
        for leaf, mine in zip(result, trees[0], strict=True):
            np.testing.assert_array_equal(leaf, mine * sum(range(1, count + 1)))


def skip_without_xla(count, jit_compile):
    if jit_compile and count > 1 and not ON_GPU:
        pytest.skip("XLA has no collectives between CPU devices")


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int64"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes(count, op, dtype, jit_compile):
    skip_without_xla(count, jit_compile)
    values = np.arange(12).reshape(4, 3)[:, ::-1] * [1, -1, 0] - 5
    values = values.astype("int64")[:count]
    if not dtype.startswith("int"):
        # NaN on the first replica, on the last, on all and on none.
        column = np.zeros((count, 4), "float32")
        column[0, 0] = column[-1, 1] = column[:, 2] = np.nan
        column[0, 3] = np.inf
        column[-1, 3] = -np.inf
        values = np.concatenate([values, column], 1)
    replicas = kc.Replicas([tf.cast(row, dtype) for row in values], count)
    reduce = kc.withdevices(
        lambda x: kc.allreduce(op, x), devices=count, jit_compile=jit_compile
    )
    for result in reduce(replicas):
        np.testing.assert_array_equal(
            tf.cast(result, tf.float64), OPS[op](values, axis=0)
        )


@given(
    st.sampled_from([tf.float16, tf.bfloat16, tf.float32, tf.float64]),
    st.lists(st.floats(width=16), min_size=2),
)
def test_integers_are_in_the_order_of_floats(dtype, values):
    x = tf.constant(values, dtype)
    expected = tf.cast(x, tf.float64).numpy()
    for op in ("min", "max"):
        integers = dtypes.to_ordered_integers(x, ops.OPS[op])
        back = tf.cast(dtypes.to_floats(integers, dtype), tf.float64)
        np.testing.assert_array_equal(back, expected)
        chosen = tf.constant(OPS[op](integers.numpy()), integers.dtype)
        np.testing.assert_array_equal(
            tf.cast(dtypes.to_floats(chosen, dtype), tf.float64),
            OPS[op](expected),
        )


@pytest.mark.parametrize("dtype", dtypes.REDUCIBLE)
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
def test_the_neutral_number_changes_nothing(op, dtype):
    values = [0, 1, -2, dtype.min, dtype.max]
    if dtype.is_floating:
        values = [*map(float, values), -0.0, float("inf"), float("-inf")]
    x = tf.constant(values, dtype)
    tf.constant(0.0 if dtype.is_floating else 0, dtype)  # TensorFlow keeps it
    found = ops.OPS[op]
    reduced = found.of_two(x, found.neutral(dtype))
    assert reduced.numpy().tobytes() == x.numpy().tobytes()


@pytest.mark.skipif(ON_GPU, reason="stands in for GPUs on CPU devices")
@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_by_integers_or_a_gathering(count, op, monkeypatch):
    """As on GPUs, in a graph and, for float64 and int64, inside XLA."""
    original = CpuRing.all_reduce

    def on_cpu(self, tensor, index, op, call):  # another one warms up
        is_tested = self is strategy.communicator._in_graph
        assert not (is_tested and tensor.dtype.is_floating)
        return original(self, tensor, index, op, call)

    def lowered(self, tensor, op):
        assert op is ops.SUM
        ring = strategy.communicator._in_graph
        return original(ring, tensor, kc.replica().index, op, None)

    strategy = kc.replicate(devices=count)
    monkeypatch.setattr(strategy.communicator, "on_gpu", True)
    monkeypatch.setattr(CpuRing, "all_reduce", on_cpu)
    monkeypatch.setattr(XlaNccl, "_lowered", lowered)
    values = np.array([[np.nan, 1, -2], [3, -1, -np.inf], [3, 0, 7]] * 3)

    @kc.withdevices(devices=count)
    def run():
        x = tf.constant(values)[kc.replica().index]
        reduced = kc.allreduce(op, [x, tf.cast(x, tf.float32)])
        steps.current().compiled = steps.CompiledStep()
        return [*reduced, kc.allreduce(op, x)]

    for results in run():
        for result in results:
            np.testing.assert_array_equal(
                result, OPS[op](values[:count], axis=0)
            )


def test_buckets_in_order_wait_for_each_other():
    tensors = [tf.fill(4, 1.0), tf.fill((2, 2), 2), tf.fill(5, 3.0)]
    given = []

    def double(flat):
        given.append(flat.numpy().tolist())
        return 2 * flat

    doubled = map_buckets(double, tensors, bucket_bytes=16, in_order=True)
    # The last tensor goes first; each takes along an element of the result.
    assert given == [[3.0] * 5, [2] * 4 + [6], [1.0] * 4 + [4.0]]
    for result, tensor in zip(doubled, tensors, strict=True):
        np.testing.assert_array_equal(result, 2 * tensor)


def test_reduce_changes_the_root_alone(count):
    values = [np.float32(i + 1) for i in range(count)]
    root = count - 1
    result = kc.reduce("sum", kc.Replicas(values, count), root=root)
    for index, value in enumerate(result):
        expected = sum(values) if index == root else values[index]
        assert float(value) == expected


@pytest.mark.parametrize("inside", [False, True])
def test_mean_to_one_replica(count, inside):
    root = count - 1
    trees = [{"w": np.float32(i), "none": None} for i in range(count)]

    def mean(tree):
        return kc.reduce("mean", tree, root=root)

    run = kc.withdevices(mean) if inside else mean
    result = run(kc.Replicas(trees, count))
    assert [float(each["w"]) for each in result[:root]] == list(range(root))
    assert float(result[root]["w"]) == sum(range(count)) / count
    assert result[root]["none"] is None


def test_one_replica_updates_and_sends_what_it_has(count):
    x, y = regression(4 * count)
    one, many = dense("adam"), kc.replicate(dense("adam"), count)
    for model in (one, many):
        model.optimizer.build(model.trainable_variables)

    def gradients_of(model, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    @kc.withdevices
    def step(x, y):
        gradients = kc.reduce("mean", gradients_of(many, x, y))
        if kc.replica().index == 0:
            many.optimizer.apply(gradients, many.trainable_variables)
        kc.broadcast(many.trainable_variables)

    for _ in range(3):
        gradients = gradients_of(one, x, y)
        one.optimizer.apply(gradients, one.trainable_variables)
        step(*kc.split((x, y), count))
    assert_same_training(one, many)
    kc.assert_in_sync(many.trainable_variables)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_a_result_that_one_replica_ignores(count, op, jit_compile):
    skip_without_xla(count, jit_compile)

    @kc.withdevices(devices=count, jit_compile=jit_compile)
    def run():
        total = kc.allreduce(op, tf.ones(()))
        return total if kc.replica().index == 0 else tf.zeros(())

    expected = count if op == "sum" else 1
    assert [float(v) for v in run()] == [expected] + [0] * (count - 1)


@pytest.mark.parametrize(
    "value",
    [
        np.array([-0.0, 0.0, np.inf, 1e-40], "float32"),
        np.array([True, False]),
        np.array([1, -(2**62)], "int64"),
        np.array([200, 3], "uint8"),
        np.array([2**32 - 1, 3], "uint32"),
        np.array([2**64 - 1, 3], "uint64"),
    ],
    ids=str,
)
def test_broadcast_is_bitwise(count, value):
    root = count - 1
    values = [np.zeros_like(value) for _ in range(count)]
    values[root] = value
    for result in kc.broadcast(kc.Replicas(values, count), root=root):
        if value.dtype == "float32":  # denormals may be flushed by a device
            assert result.numpy()[:3].tobytes() == value[:3].tobytes()
        else:
            assert result.numpy().tobytes() == value.tobytes()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_allgather_takes_uneven_sizes(count, axis):
    rng = np.random.default_rng(0)
    values = []
    for index in range(count):
        shape = [2, 3, 4]
        shape[axis] = index  # the first replica has none
        values.append(rng.normal(size=shape).astype("float32"))
    expected = np.concatenate(values, axis)
    for result in kc.allgather(kc.Replicas(values, count), axis=axis):
        np.testing.assert_array_equal(result, expected)


def test_allgather_joins_scalars(count):
    values = [np.int32(i) for i in range(count)]
    for result in kc.allgather(kc.Replicas(values, count)):
        np.testing.assert_array_equal(result, range(count))


@pytest.mark.parametrize(
    ("op", "zeros"),
    # Of equal values a minimum or maximum has no derivative.
    [
        *((op, False) for op in sorted(OPS)),
        *((op, True) for op in ("sum", "mean", "product")),
    ],
)
def test_gradient_is_the_finite_difference(count, op, zeros):
    rng = np.random.default_rng(1)
    points = rng.uniform(0.5, 2, (count, 3))
    if zeros:
        points[0, 0] = points[-1, 1] = 0
        if count > 1:
            points[:2, 2] = 0
    weights = rng.uniform(size=(count, 3))

    def total(points):
        reduced = OPS[op](points, axis=0)
        return float((weights * reduced**2).sum())

    expected = np.zeros_like(points)
    for place in np.ndindex(*points.shape):
        step = np.zeros_like(points)
        step[place] = 1e-6
        change = total(points + step) - total(points - step)
        expected[place] = change / 2e-6

    @kc.withdevices
    def gradient(point, weight):
        with tf.GradientTape() as tape:
            tape.watch(point)
            reduced = kc.allreduce(op, {"a": point, "b": None})["a"]
            loss = tf.reduce_sum(weight * reduced**2)
        return tape.gradient(loss, point)

    result = gradient(
        kc.Replicas(list(map(tf.constant, points)), count),
        kc.Replicas(list(map(tf.constant, weights)), count),
    )
    np.testing.assert_allclose(np.stack(list(result)), expected, atol=1e-6)


@pytest.mark.parametrize("op", ["min", "max"])
def test_equal_extremes_share_the_gradient(count, op):
    @kc.withdevices(devices=count)
    def gradient():
        point = tf.constant([3.0, float(kc.replica().index == 0)])
        with tf.GradientTape() as tape:
            tape.watch(point)
            loss = tf.reduce_sum(kc.allreduce(op, point))
        return tape.gradient(loss, point)

    # Each replica's loss is of the reduced value, so there are `count` to
    # share. The second entry is 1 on replica 0 and 0 on the others.
    ones = 1 if op == "max" else max(count - 1, 1)
    for index, result in enumerate(gradient()):
        chosen = (index == 0) == (op == "max") or count == 1
        second = count / ones if chosen else 0
        np.testing.assert_allclose(result, [1, second], rtol=1e-6)


def test_gradient_of_allgather(count):
    @kc.withdevices(devices=count)
    def gradient():
        point = tf.fill([kc.replica().index + 1], 2.0)
        with tf.GradientTape() as tape:
            tape.watch(point)
            gathered = kc.allgather(point)
            loss = tf.reduce_sum(gathered**2)
        return tape.gradient(loss, point)

    for index, result in enumerate(gradient()):
        np.testing.assert_allclose(result, [4.0 * count] * (index + 1))


def test_shapes_may_change_between_calls():
    run = kc.withdevices(lambda x: kc.allreduce("sum", x), devices=MANY)
    for size in (3, 5, 2, 7, 0):
        for result in run(kc.replicate(tf.ones([size]), MANY)):
            np.testing.assert_array_equal(result, np.full(size, MANY))


def test_in_a_branch():
    @kc.withdevices(devices=MANY)
    def run(flag):
        if flag:
            return kc.allreduce("sum", tf.ones(2))
        return tf.zeros(2)

    assert float(run(tf.constant(True))[0][0]) == MANY
    assert float(run(tf.constant(False))[0][0]) == 0
    assert float(run(tf.constant(True))[-1][0]) == MANY


@tf.custom_gradient
def _two_sums(x, y):
    sums = kc.allreduce("sum", x), kc.allreduce("sum", y)
    return sums, lambda dx, dy: (dx, dy)


@pytest.mark.long
@pytest.mark.parametrize("around", [lambda run: run, tf.function])
def test_after_a_gradient_of_the_users_own(around):
    """TensorFlow joins its results, and later drops what joins them."""

    @kc.withdevices(devices=MANY)
    def step(x):
        first, second = _two_sums(x, 10 * x)
        return first, second, kc.allreduce("sum", first + 1)

    x = kc.replicate(tf.ones(2), MANY)
    run = around(lambda: step(x)[0])
    for _ in range(25):
        first, second, third = run()
        np.testing.assert_array_equal(first, [MANY] * 2)
        np.testing.assert_array_equal(second, [10 * MANY] * 2)
        np.testing.assert_array_equal(third, [MANY * (MANY + 1)] * 2)


def test_in_a_loop_around_the_replicas():
    strategy = kc.replicate(devices=MANY)

    @tf.function
    def run():
        total = tf.zeros(2)
        for _ in tf.range(3):
            result = strategy.run(lambda: kc.allreduce("sum", tf.ones(2)))
            total += strategy.experimental_local_results(result)[0]
        return total

    np.testing.assert_array_equal(run(), [3 * MANY] * 2)


def test_through_the_replica_context_of_tensorflow():
    strategy = kc.replicate(devices=MANY)

    @tf.function
    def run():
        context = tf.distribute.get_replica_context()
        values = [tf.ones(2), tf.ones(3, tf.bfloat16)]
        summed = context.all_reduce("SUM", values)
        return [*summed, context.all_reduce("MEAN", tf.ones(()))]

    results = strategy.run(run)
    for value, size in zip(results, (MANY, MANY, 1), strict=True):
        for local in strategy.experimental_local_results(value):
            assert np.all(tf.cast(local, tf.float32) == size)


def test_a_model_without_variables_is_named():
    model = keras.Sequential([keras.layers.Dense(1)], name="not_built")
    with pytest.raises(ValueError, match=r"floating-point var.*not_built"):
        kc.allreduce("mean", model)


def test_in_place_on_variables():
    strategy = kc.replicate(devices=MANY)
    with strategy:
        variable = keras.Variable([1.0, 2.0])
    copies = strategy.experimental_local_results(variable.value)
    for index, copy in enumerate(copies):
        copy.assign([float(index), 1.0])
    assert kc.allreduce("mean", [variable]) is None
    kc.assert_in_sync(variable)
    np.testing.assert_allclose(variable.numpy(), [(MANY - 1) / 2, 1.0])

    @kc.withdevices(devices=MANY)
    def double():
        kc.allreduce("sum", variable)

    double()
    np.testing.assert_allclose(variable.numpy(), [(MANY - 1) / 2 * MANY, MANY])


@several
def test_a_variable_that_one_replica_alone_does_not_use():
    strategy = kc.replicate(devices=MANY)
    with strategy:
        used, some = keras.Variable([1.0, 2.0]), keras.Variable(3.0)

    @kc.withdevices(devices=MANY)
    def step(x, **options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used * x)
            if kc.replica().index == 0:
                loss += some
        # Not of Keras variables: with "zero", Keras 3.15.1 raises on these.
        variables = {"used": used.value, "some": some.value}
        return kc.allreduce("sum", tape.gradient(loss, variables, **options))

    with pytest.raises(
        kc.ReplicaMismatchError,
        match=r"\['some'\] replica 0 has float32\(\), replica 1 has None.*"
        r"put `tf\.zeros_like\(variable\)` there",
    ):
        step(1.0)
    for gradients in step(1.0, unconnected_gradients="zero"):
        np.testing.assert_array_equal(gradients["used"], [MANY, MANY])
        assert float(gradients["some"]) == 1.0


@several
@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (np.ones((2, 4), "float32"), r"float32\(\?, 3\).*float32\(\?, 4\)"),
        (np.ones((2, 3), "int32"), r"float32.*int32"),
        (np.ones((2, 3, 1), "float32"), r"\(\?, 3\).*\(\?, 3, 1\)"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_it_is_sent(other, differs):
    """Sent, it would make all later collectives of the process fail."""
    one = np.ones((2, 3), "float32")
    given = [one] * (MANY - 1) + [other]
    with pytest.raises(kc.ReplicaMismatchError, match=differs):
        kc.allgather(*given)
    (joined, *_) = kc.allgather(*[one] * MANY)
    assert joined.shape == (2 * MANY, 3)


def test_trees_of_other_ranks_are_joined_one_after_another():
    for shape in ((2, 3), (2,), (2, 3, 1)):
        (joined, *_) = kc.allgather(*[np.ones(shape)] * MANY)
        assert joined.shape == (2 * MANY, *shape[1:])


def test_rows_of_numpy_are_reduced_outside():
    rows = [
        tf.IndexedSlices(np.ones((1, 2), "float32"), np.array([index]))
        for index in range(MANY)
    ]
    (reduced, *_) = kc.allreduce("sum", *rows)
    assert len(reduced.indices) == MANY


def test_a_variable_that_no_replica_uses_is_left_alone(count):
    model = kc.replicate(dense("sgd"), count)
    unused = model.layers[1].kernel
    before = unused.numpy()

    @kc.withdevices(devices=count)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model.layers[0](x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = kc.allreduce("mean", gradients)
        model.optimizer.apply(gradients, model.trainable_variables)
        return [gradient is None for gradient in gradients]

    shared = kc.replicate(tf.ones((2, 8)), count)
    assert step(shared)[0] == [False, False, True, True]
    np.testing.assert_array_equal(unused.numpy(), before)
    kc.assert_in_sync(model)


def reductions(text):
    """Returns what reduces in XLA's program, with what each depends on."""
    operands, ops = {}, {}
    for line in text.splitlines():
        if found := re.match(r"\s+(?:ROOT )?(%\S+) = .*? ([a-z-]+)\(", line):
            name, ops[name] = found.group(1), found.group(2)
            operands[name] = re.findall(r"%[\w.]+", line[found.end() :])
    entry = text[text.index("ENTRY") :]
    reduce = [
        name
        for name in re.findall(r"(%\S+) = ", entry)
        if ops.get(name) in ("all-reduce", "conditional")
    ]

    def ancestors(name, seen):
        for operand in operands.get(name, ()):
            if operand not in seen:
                seen.add(operand)
                ancestors(operand, seen)
        return seen

    return [(name, ancestors(name, set())) for name in reduce]


@pytest.mark.parametrize("in_order", [True, False])
def test_collectives_of_programs_that_differ_are_in_order(in_order):
    transport = XlaNccl(DEVICES[:1], int, 2, group_key=1, in_order=in_order)
    call = functools.partial(transport.all_reduce, index=0, call="")

    @tf.function
    def inner():
        return call(tf.ones([2, 3]), op=ops.SUM)

    @tf.function(jit_compile=True)
    def program(rows, chosen):
        first = inner()
        branch = tf.cond(chosen, lambda: call(rows, op=ops.MAX), lambda: rows)
        return first, branch, call(tf.zeros([], tf.int32), op=ops.SUM)

    given = tf.ones([4], tf.int64), tf.constant(True)
    text = program.experimental_get_compiler_ir(*given)(stage="hlo")
    before, *others = reductions(text)
    assert len(others) == 2
    for each in others:
        assert (before[0] in each[1]) == in_order
        before = each


def test_collectives_of_branches_and_functions_may_have_other_ranks():
    transport = XlaNccl(DEVICES[:1], int, 2, group_key=1, in_order=False)
    call = functools.partial(transport.all_reduce, index=0, call="", op=ops.SUM)

    @tf.function(jit_compile=True)
    def program(rows, chosen):
        branch = tf.cond(
            chosen, lambda: call(rows[0, 0]), lambda: tf.reduce_sum(call(rows))
        )
        return call(rows[0]), branch, tf.function(call)(rows)

    given = tf.ones([4, 2]), tf.constant(True)
    text = program.experimental_get_compiler_ir(*given)(stage="optimized_hlo")
    assert len(reductions(text))


@pytest.mark.skipif(MANY < 2 or ON_GPU, reason="needs two CPU devices")
def test_losses_and_metrics_of_several_outputs_are_not_exchanged(monkeypatch):
    inputs = keras.Input((8,))
    outputs = [keras.layers.Dense(1)(inputs) for _ in range(2)]
    model = keras.Model(inputs, outputs)
    metrics = [["mae"], [keras.metrics.AUC()]]
    model.compile("sgd", ["mse", "mae"], metrics=metrics)
    kc.replicate(model, devices=DEVICES[:2])
    calls = []
    reduce = Communicator.all_reduce

    def all_reduce(self, *args, **kwargs):
        calls.append(1)
        return reduce(self, *args, **kwargs)

    monkeypatch.setattr(Communicator, "all_reduce", all_reduce)
    x, y = regression(8)
    chances = (y > 0).astype("float32")
    model.fit(x, [y, chances], batch_size=8, verbose=0)
    assert len(calls) == 2  # the gradients of each replica


@several
def test_an_all_reduce_outside_of_functions_is_traced_once(monkeypatch):
    reduce, traced = ReplicaCollectives.all_reduce, []

    def noted(this, *arguments):
        traced.append(arguments)
        return reduce(this, *arguments)

    monkeypatch.setattr(ReplicaCollectives, "all_reduce", noted)
    given = tf.distribute.NcclAllReduce()
    strategy = kc.ReplicatedStrategy(MANY, cross_device_ops=given)
    for shape, times in (([3], 1), ([3], 1), ([2, 2], 2)):
        parts = strategy.run(
            lambda shape=shape: tf.ones(shape) * (kc.replica().index + 1.0)
        )
        extended = strategy.extended
        found = extended.batch_reduce_to("SUM", [(parts, parts)] * 2)
        total = np.full(shape, MANY * (MANY + 1) / 2)
        for each in found:
            for copy in strategy.experimental_local_results(each):
                np.testing.assert_array_equal(copy, total)
        assert len(traced) == times * MANY


@several
def test_nccl_is_left_alone_with_parts_on_one_device():
    nccl = tf.distribute.NcclAllReduce()
    strategy = kc.ReplicatedStrategy(MANY, cross_device_ops=nccl)
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([3]) * context.replica_id_in_sync_group
    )
    extended, local = strategy.extended, strategy.experimental_local_results
    assert len({part.device for part in local(parts)}) == 1
    assert cross_device.able_to_reduce(parts, nccl) is not nccl
    assert (
        cross_device.able_to_reduce(strategy.run(tf.ones, ([3],)), nccl) is nccl
    )

    def reduced(parts):
        (in_batch,) = extended.batch_reduce_to("SUM", [(parts, parts)])
        return extended.reduce_to("SUM", parts, parts), in_batch

    for run in (reduced, tf.function(reduced, autograph=False)):
        for found in run(parts):
            for copy in local(found):
                np.testing.assert_array_equal(copy, [MANY * (MANY - 1) / 2] * 3)


@several
def test_a_function_of_eager_replicas_exchanges_nothing():
    """TensorFlow runs eager replicas one after another: both would wait."""
    strategy = kc.ReplicatedStrategy(DEVICES[:2])
    total = tf.function(lambda: kc.allreduce("sum", tf.ones(())))
    with pytest.raises(NotImplementedError, match="one after another"):
        strategy.run(lambda: total())
    [*totals] = strategy.experimental_local_results(strategy.run(total))
    assert totals == [2.0, 2.0]
