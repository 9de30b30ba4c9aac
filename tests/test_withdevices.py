"""`withdevices`: what goes in, what comes out, and what errors say."""

import pathlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from models import assert_same_training
from models import dense
from models import regression

import keras_conflux as kc

X, Y = regression(64)
SIZES = 2 * MANY, 2 * MANY + 1, 2 * MANY, 2 * MANY - 1, 1


def test_arguments_are_split_or_shared(count):
    @kc.withdevices
    def run(mine, shared, *, option):
        return {"sum": mine["x"] + shared + option, "none": None}

    mine = kc.Replicas([{"x": float(i)} for i in range(count)], count)
    result = run(mine, 10.0, option=tf.constant(100.0))
    assert result.devices == DEVICES[:count]
    assert [float(r["sum"]) for r in result] == [
        110.0 + i for i in range(count)
    ]
    assert result[0]["none"] is None


def test_replica_knows_where_it_is(count):
    seen = []
    kc.withdevices(lambda: seen.append(kc.replica()), devices=count)()
    assert seen[-count:] == [
        kc.Replica(index, count, DEVICES[index]) for index in range(count)
    ]
    with pytest.raises(kc.StrategyError, match="known only while"):
        kc.replica()


def test_python_control_flow_over_tensors():
    @kc.withdevices(devices=MANY)
    def run(n):
        total = 0
        for i in tf.range(n):
            if i % 2 == 0:
                total += i
        return total

    assert [int(v) for v in run(tf.constant(6))] == [6] * MANY


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_around", [True, False])
def test_a_function_gets_parts_of_any_sizes(is_around, is_compiled, count):
    """Replicas may call its traces of earlier steps, or trace it anew."""
    model = dense()
    mean = keras.metrics.Mean()
    expected = []
    for size in SIZES:
        errors = tf.square(model(X[:size]) - Y[:size])
        mean.update_state(errors)
        expected.append(float(tf.reduce_mean(errors)))
    total = float(mean.result())
    kc.replicate(model, devices=count)
    mean = kc.replicate(keras.metrics.Mean(), devices=count)

    @tf.function(reduce_retracing=True)
    def inner(x, y):
        error = tf.reduce_mean(tf.square(model(x) - y))
        mean.update_state(error, sample_weight=len(x))
        return kc.allreduce("mean", error, weight=len(x))

    step = inner if is_around else lambda x, y: inner(x, y)
    step = kc.withdevices(step, jit_compile=is_compiled)
    for size, value in zip(SIZES, expected, strict=True):
        (found, *_) = step(*kc.split((X[:size], Y[:size]), devices=count))
        np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(mean.result(), total, rtol=1e-5)


def test_custom_loop_equals_one_device(count):
    loss_fn = keras.losses.MeanSquaredError()
    parts = tf.data.Dataset.from_tensor_slices((X, Y)).batch(13)  # uneven

    def single(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, one(x, training=True))
        grads = tape.gradient(loss, one.trainable_variables)
        one.optimizer.apply(grads, one.trainable_variables)

    @kc.withdevices
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, many(x, training=True))
        grads = tape.gradient(loss, many.trainable_variables)
        grads = kc.allreduce("mean", grads, weight=len(x))
        many.optimizer.apply(grads, many.trainable_variables)
        return loss

    one, many = dense("adam"), kc.replicate(dense("adam"), count)
    for _ in range(2):
        for x, y in parts:
            single(x, y)
        for x, y in kc.distribute(parts, count):
            losses = step(x, y)
    assert len(losses) == count
    assert_same_training(one, many)
    kc.assert_in_sync(many)


@several
@pytest.mark.parametrize("gathers", [True, False])
def test_samples_are_compared_with_those_that_are_gathered(gathers):
    def losses(count):
        model = dense("sgd")
        if count:
            kc.replicate(model, count)

        def step(x, y):
            with tf.GradientTape() as tape:
                p = model(x)
                if count and gathers:
                    p, y = kc.allgather(p), kc.allgather(y)
                loss = tf.reduce_mean(tf.abs(p - tf.transpose(y)))
            grads = tape.gradient(loss, model.trainable_variables)
            if count:
                weight = None if gathers else len(x)
                grads = kc.allreduce("mean", grads, weight=weight)
            model.optimizer.apply(grads, model.trainable_variables)
            return loss

        if not count:
            return [float(step(X, Y)) for _ in range(3)]
        step, parts = kc.withdevices(step), kc.split((X, Y), count)
        return [float(step(*parts)[0]) for _ in range(3)]

    are_equal = np.allclose(losses(MANY), losses(None), rtol=1e-5)
    assert are_equal == gathers


def test_optimizer_built_in_the_first_step():
    keras.utils.set_random_seed(0)
    model = kc.replicate(dense(), MANY)
    optimizer = kc.replicate(keras.optimizers.Adam(1e-2), MANY)

    @kc.withdevices
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        grads = kc.allreduce("mean", grads, weight=len(x))
        optimizer.apply(grads, model.trainable_variables)
        return loss

    x, y = kc.split((X, Y), MANY)
    first = float(step(x, y)[0])
    for _ in range(30):
        last = float(step(x, y)[0])
    assert last < first
    kc.assert_in_sync(model)
    kc.assert_in_sync(optimizer)
    assert int(optimizer.iterations) == 31


@several
def test_applying_local_gradients_warns_once():
    model = kc.replicate(dense("sgd"), MANY)

    @kc.withdevices
    def forgot(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(grads, model.trainable_variables)

    x, y = kc.split((X, Y), MANY)
    with pytest.warns(
        kc.ConfluxWarning, match=r"forgot: .*allreduce"
    ) as caught:
        forgot(x, y)
    (ours,) = [w for w in caught if "drift apart" in str(w.message)]
    assert ours.filename == __file__
    first = forgot.__wrapped__.__code__.co_firstlineno
    assert ours.lineno == first + 5  # that of `apply`
    assert not kc.in_sync(model)
    with pytest.raises(kc.ReplicaMismatchError, match=r"kernel.*by up to"):
        kc.assert_in_sync(model)
    kc.synchronize(model)
    kc.assert_in_sync(model)


@several
def test_a_bare_strategy_run_sums_as_keras_documents():
    strategy = kc.replicate(devices=MANY)
    one, many = dense("sgd"), kc.replicate(dense("sgd"), MANY)
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(64)
    )

    def step(model, x, y, count):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / count
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(grads, model.trainable_variables)

    @tf.function
    def run(x, y):
        strategy.run(lambda x, y: step(many, x, y, 64), args=(x, y))

    for x, y in data:
        run(x, y)
    step(one, X, Y, 64)
    assert_same_training(one, many)


def test_an_optimizer_may_be_built_in_a_function_of_its_own():
    one, many = dense("adam"), kc.replicate(dense("adam"), MANY)

    @tf.function
    def inner(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((many(x) - y) ** 2)
        grads = tape.gradient(loss, many.trainable_variables)
        grads = kc.allreduce("mean", grads)
        many.optimizer.apply(grads, many.trainable_variables)

    step = kc.withdevices(lambda x, y: inner(x, y), devices=MANY)
    even = len(X) // MANY * MANY  # else a mean of means is not the mean
    for _ in range(2):
        step(*kc.split((X[:even], Y[:even]), MANY))
        one.train_on_batch(X[:even], Y[:even])
    assert_same_training(one, many)


def mean_of(x, _):
    return tf.reduce_sum(x) / len(x)


def with_a_share_of(x, _):
    return x * (1 / len(x))


@several
@pytest.mark.parametrize(
    "use",
    [
        mean_of,
        with_a_share_of,
        lambda x, rows: tf.reduce_sum(x) / rows,
        lambda x, rows: tf.reshape(x, (rows, 2, -1)),
        lambda x, rows: tf.zeros((rows, 4)),
        lambda x, rows: tf.stack([x[i] for i in range(rows)]),
    ],
)
def test_a_number_of_rows_that_is_not_known_is_explained(use):
    step = kc.withdevices(lambda x: use(x, x.shape[0]))
    step(kc.split(X[:8], MANY))
    with pytest.raises((TypeError, ValueError)) as caught:
        step(kc.split(X[: 3 * MANY], MANY))
    assert "Write `len(x)`" in caught.value.__notes__[0]


@several
def test_an_exception_names_its_replica():
    class Odd(Exception):
        pass

    @kc.withdevices(devices=MANY)
    def run(fail):
        if fail and kc.replica().index == 1:
            raise Odd("no good")
        return kc.allreduce("sum", tf.ones(()))

    with pytest.raises(Odd, match="no good") as caught:
        run(True)
    assert f"replica 1 ({DEVICES[1]})" in caught.value.__notes__[-1]
    assert float(run(False)[0]) == MANY


@several
@pytest.mark.skipif(
    DEVICES[0].kind == "GPU", reason="the raw NCCL op cannot be cancelled"
)
def test_an_error_while_running_leaves_the_next_call_sound():
    @kc.withdevices(devices=MANY)
    def run(x):
        tf.debugging.assert_less(x, 5.0)
        return kc.allreduce("sum", x)

    fine = kc.Replicas([1.0] * MANY, MANY)
    wrong = kc.Replicas([1.0] * (MANY - 1) + [7.0], MANY)
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            run(wrong)
        assert f"replica {MANY - 1} " in caught.value.__notes__[-1]
        assert float(run(fine)[0]) == MANY


@several
@pytest.mark.skipif(ON_GPU, reason="oneDNN is of CPU devices")
def test_an_error_without_samples_names_onednn():
    """Whatever TensorFlow says, as oneDNN does not fail everywhere."""

    @kc.withdevices
    def run(x, limit, rate):
        tf.debugging.assert_positive(len(x["rows"]))
        tf.debugging.assert_less(x["rows"], limit)
        return rate

    def notes(rows, limit):
        batch = {"rows": np.ones(rows, "float32")}
        rates = kc.Replicas([0.1] * MANY, MANY)
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            run(kc.split(batch, MANY), limit, rates)
        return " ".join(caught.value.__notes__)

    said = notes(MANY - 1, 5.0)
    assert f"Replica {MANY - 1} ({DEVICES[MANY - 1]}) has no samples" in said
    assert "`TF_ENABLE_ONEDNN_OPTS=0`" in said
    assert "drop_remainder=True" in said
    said = notes(MANY, 0.5)
    assert "Raised in replica" in said
    assert "no samples" not in said


@several
def test_side_effects_around_a_collective_do_not_wait_for_each_other():
    def effect(x):
        y = tf.numpy_function(lambda v: v, [x], tf.float32)
        return tf.ensure_shape(y, ())

    @kc.withdevices(devices=MANY)
    def run(x):
        return effect(kc.allreduce("sum", effect(x)))

    assert [float(v) for v in run(1.0)] == [MANY] * MANY

    @tf.function
    def traced(x):
        return effect(kc.allreduce("sum", effect(x)))

    strategy = kc.replicate(devices=MANY)
    result = strategy.run(traced, args=(tf.ones(()),))
    assert float(strategy.experimental_local_results(result)[0]) == MANY


@several
def test_calls_that_differ_between_replicas_raise():
    def some(op="sum"):
        if kc.replica().index == 0:
            return kc.allreduce(op, tf.ones(()))
        return tf.ones(())

    with pytest.raises(kc.ReplicaMismatchError, match="1 more collective"):
        kc.withdevices(some, devices=MANY)()

    def others():
        op = "sum" if kc.replica().index == 0 else "max"
        return kc.allreduce(op, tf.ones(()))

    with pytest.raises(kc.ReplicaMismatchError, match=r"'sum'.*'max'"):
        kc.withdevices(others, devices=MANY)()

    def shapes():
        return kc.allreduce("sum", {"a": tf.ones(kc.replica().index + 1)})

    with pytest.raises(kc.ReplicaMismatchError, match=r"\['a'\]"):
        kc.withdevices(shapes, devices=MANY)()


@several
def test_sizes_that_differ_at_run_time_raise():
    run = kc.withdevices(lambda x: kc.allreduce("sum", x), devices=MANY)
    run(kc.replicate(tf.ones(3), MANY))
    # From here on the size is unknown while tracing.
    run(kc.replicate(tf.ones(4), MANY))
    uneven = kc.Replicas([tf.ones(2 + i) for i in range(MANY)], MANY)
    with pytest.raises(
        (tf.errors.InvalidArgumentError, kc.ReplicaMismatchError),
        match=r"sizes differ|float32",
    ):
        run(uneven)
    assert float(run(kc.replicate(tf.ones(3), MANY))[0][0]) == MANY


@several
def test_a_collective_in_a_loop_of_the_program_raises():
    @kc.withdevices(devices=MANY)
    def run(x):
        for _ in tf.range(3):
            x = kc.allreduce("sum", x)
        return x

    with pytest.raises(NotImplementedError, match="loop around the step"):
        run(kc.replicate(tf.ones(2), MANY))


def test_nesting_is_refused():
    inner = kc.withdevices(lambda: 1.0, devices=MANY)
    with pytest.raises(kc.StrategyError, match="inside another"):
        kc.withdevices(lambda: inner(), devices=MANY)()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kc.allreduce("xor", 1.0, 2.0), ValueError, "Unknown op 'xor'"),
        (lambda: kc.allreduce("sum", []), ValueError, "no leaves"),
        (lambda: kc.allreduce("sum", np.ones(3)), kc.StrategyError, "outside"),
        (
            lambda: kc.allreduce("max", 1.0, 2.0, weight=1.0),
            ValueError,
            "'mean' only",
        ),
        (
            lambda: kc.allreduce("sum", {"a": 1.0}, {"b": 1.0}),
            kc.ReplicaMismatchError,
            r"replica 0 has a leaf at \['a'\]",
        ),
        (
            lambda: kc.allreduce(
                "sum", {"a": [1, np.ones(2)]}, {"a": [1, 1.0]}
            ),
            kc.ReplicaMismatchError,
            r"\['a'\]\[1\] replica 0 has float64\(2\)",
        ),
        (
            lambda: kc.allreduce("sum", [1.0, None], [1.0, 1.0]),
            kc.ReplicaMismatchError,
            r"\[1\] replica 0 has None",
        ),
        (
            lambda: kc.allreduce("sum", np.int32(1), np.int64(1)),
            kc.ReplicaMismatchError,
            "int32.*int64",
        ),
        (
            lambda: kc.allreduce("sum", ["a"], ["b"]),
            TypeError,
            r"\[0\] is string",
        ),
        (
            lambda: kc.allreduce("mean", np.complex64(1), np.complex64(2)),
            TypeError,
            "complex64",
        ),
        (lambda: kc.broadcast(1.0, 2.0, root=5), ValueError, "from 0 to 1"),
    ],
)
@several
def test_wrong_input_raises_at_the_call(call, error, message):
    with pytest.raises(error, match=message):
        call()


def sgd_step(model, optimizer):
    @kc.withdevices(devices=MANY)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = kc.allreduce("mean", gradients, weight=len(x))
        optimizer.apply(gradients, model.trainable_variables)

    return step


@pytest.mark.parametrize("of_several", [(), ("model",), ("optimizer",)])
@pytest.mark.parametrize("built", [True, False])
def test_a_step_that_writes_what_has_a_single_copy(of_several, built):
    model, optimizer = dense(), keras.optimizers.Adam()
    if "model" in of_several:
        kc.replicate(model, MANY)
    if built:
        optimizer.build(model.trainable_variables)
    if "optimizer" in of_several:
        kc.replicate(optimizer, MANY)
    before = model.get_weights()
    with pytest.raises(kc.StrategyError, match=r"keras_conflux\.replicate"):
        sgd_step(model, optimizer)(*kc.split(regression(16), MANY))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)


def test_what_stops_replicas_is_told_and_not_that_they_stop():
    def fail(_):
        raise KeyError("from outside of the replicas")

    @kc.withdevices(devices=MANY)
    def run():
        tf.distribute.get_replica_context().merge_call(fail)

    with pytest.raises(KeyError, match="from outside of the replicas"):
        run()


def test_a_metric_counts_on_each_replica():
    mean = kc.replicate(keras.metrics.Mean(), MANY)

    @kc.withdevices(devices=MANY)
    def count(x):
        mean.update_state(x)

    x = np.arange(10, dtype="float32")
    count(kc.split(x, MANY))
    assert float(mean.result()) == x.mean()
    assert float(kc.unreplicate(mean).result()) == x.mean()


def test_arguments_choose_among_the_programs_that_are_traced():
    @kc.withdevices(devices=MANY)
    def difference(x, y=0):
        return x["a"] - x["b"] if isinstance(x, dict) else x - y

    one, two = tf.constant(1.0), tf.constant(2.0)
    calls = [
        ((one, two), -1.0),
        (({"a": one, "b": two},), -1.0),
        (({"b": one, "a": two},), 1.0),
        ((np.array([[3, 4]]), np.array([[1, 2]])), [[2, 2]]),
        ((np.array([3.0]), np.array([0.5])), [2.5]),
        ((two, 1), 1.0),
        ((two, 2), 0.0),
        ((two,), 2.0),
    ]
    for arguments, expected in 2 * calls:
        for found in difference(*arguments):
            np.testing.assert_array_equal(found, expected)


def test_many_steps_in_a_program_are_no_reason_to_warn(recwarn, caplog):
    for _ in range(8):
        kc.withdevices(lambda x: x + 1, devices=MANY)(tf.ones(2))
    assert "retracing" not in caplog.text


def test_many_steps_in_a_function_of_the_users_own(count):
    step = kc.withdevices(lambda x: kc.allreduce("sum", x), devices=count)

    @tf.function
    def run(parts):
        for _ in tf.range(2):
            parts = step(parts)
        return parts

    first = kc.Replicas([tf.constant(float(i)) for i in range(count)], count)
    found = run(first)
    assert found.devices == first.devices
    expected = count * sum(range(count))
    assert [float(each) for each in found] == [expected] * count


def test_a_whole_step_runs_eagerly():
    model = kc.replicate(dense(), MANY)
    optimizer = kc.replicate(keras.optimizers.SGD(0.1), MANY)
    tf.config.run_functions_eagerly(True)
    try:
        sgd_step(model, optimizer)(*kc.split(regression(16), MANY))
    finally:
        tf.config.run_functions_eagerly(False)
    assert int(optimizer.iterations) == 1
    kc.assert_in_sync(model)


def test_nothing_is_in_sync():
    assert kc.in_sync([])


@several
@pytest.mark.parametrize("other", ["model", "optimizer", "batch"])
def test_parts_of_a_step_on_other_devices_are_named(other):
    def devices(part):
        return 1 if part == other else MANY

    model = kc.replicate(dense(), devices("model"))
    optimizer = kc.replicate(keras.optimizers.SGD(), devices("optimizer"))

    @kc.withdevices
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = kc.allreduce("mean", gradients)
        optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(kc.StrategyError, match="have the same devices"):
        step(*kc.split(regression(), devices("batch")))


@kc.withdevices(devices=MANY)
def in_a_branch_of_samples(x, flag):
    if tf.reduce_sum(x) > 0:
        return kc.allreduce("sum", x)
    return x


@kc.withdevices(devices=MANY)
def in_a_function_in_a_branch(x, flag):
    reduce = tf.function(lambda x: kc.allreduce("sum", x))
    return tf.cond(tf.random.uniform([]) > 0.5, lambda: reduce(x), lambda: x)


WEIGHT = keras.Variable([1.0, 2.0])
COUNTING = keras.optimizers.SGD()


@kc.withdevices(devices=MANY)
def in_a_branch_of_a_weight(x, flag):
    return tf.cond(
        WEIGHT.value[0] > 0, lambda: kc.allreduce("sum", x), lambda: x
    )


@several
@pytest.mark.parametrize(
    "step",
    [
        in_a_branch_of_samples,
        in_a_function_in_a_branch,
        in_a_branch_of_a_weight,
    ],
)
def test_a_collective_that_not_all_may_come_to_is_refused(step):
    x = kc.split(tf.ones([2 * MANY]), devices=MANY)
    for _ in range(2):
        with pytest.raises(kc.StrategyError, match="is in a branch") as error:
            step(x, tf.constant(True))
        assert pathlib.Path(__file__).name in str(error.value)


@pytest.mark.parametrize(
    "condition",
    [
        lambda x, flag: flag,
        lambda x, flag: kc.allreduce("max", tf.reduce_sum(x)) > 0,
        lambda x, flag: COUNTING.iterations.value % 2 == 0,
        lambda x, flag: tf.constant(2) > 1,
    ],
    ids=["an argument", "a result", "a counter", "a constant"],
)
def test_a_collective_that_all_come_to_may_be_in_a_branch(condition):
    kc.replicate(COUNTING, devices=MANY)

    @kc.withdevices(devices=MANY)
    def step(x, flag):
        return tf.cond(
            condition(x, flag), lambda: kc.allreduce("sum", x), lambda: x
        )

    x = kc.split(tf.ones([2 * MANY]), devices=MANY)
    for result in step(x, tf.constant(True)):
        np.testing.assert_array_equal(result, [MANY] * 2)


@several
def test_an_argument_that_is_split_has_another_trace():
    @kc.withdevices(devices=MANY)
    def step(flag):
        return tf.cond(
            flag, lambda: kc.allreduce("sum", 1.0), lambda: tf.constant(0.0)
        )

    assert float(step(tf.constant(True))[0]) == MANY
    flags = kc.Replicas([tf.constant(i > 0) for i in range(MANY)], devices=MANY)
    with pytest.raises(kc.StrategyError, match="is in a branch"):
        step(flags)


@several
def test_a_step_that_hangs_raises_and_names_the_replica(monkeypatch):
    go_on, waited = threading.Event(), threading.Event()

    def wait():
        go_on.wait(60)
        waited.set()
        return 0.0

    @kc.withdevices(devices=MANY)
    def step(x):
        if kc.replica().index == 1:
            x += tf.reshape(tf.py_function(wait, [], tf.float32), ())
        return x * 2

    monkeypatch.setenv("CONFLUX_STEP_TIMEOUT", "2")
    try:
        with pytest.raises(kc.StepTimeoutError, match="replica 1 ") as error:
            step(tf.constant(1.0))
        assert "replica 0" not in str(error.value)
    finally:
        go_on.set()
    assert waited.wait(30)
    monkeypatch.delenv("CONFLUX_STEP_TIMEOUT")
    assert float(step(tf.constant(1.0))[0]) == 2.0


def test_a_tape_around_a_step_sees_it():
    @kc.withdevices(devices=1)
    def step(x):
        return x * x

    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = step(x)[0]
    assert float(tape.gradient(y, x)) == 6.0


@several
def test_a_batch_that_is_not_split_warns_once():
    x, y = np.ones((2 * MANY + 1, 2)), np.ones(2 * MANY + 1)
    table = np.ones(2 * MANY)
    parts = kc.split((x, {"y": y}), MANY)
    whole = {"x": x, "name": "rows"}

    def step():
        return kc.withdevices(lambda *_, **given: 1.0, devices=MANY)

    for args, kwargs in [
        ((x, y), {}),
        ((whole,), {}),
        ((), {"x": tf.constant(x)}),
        ((parts[0], y), {}),
        ((parts[1],), {"x": x}),
    ]:
        run = step()
        with pytest.warns(kc.ConfluxWarning, match="gets all rows of float"):
            run(*args, **kwargs)
        run(*args, **kwargs)
    for args in [
        (),
        (0.1, np.float32(2), tf.constant(1), "text", None, [1, 2]),
        (*parts, table, np.ones((1, 7))),
        (kc.replicate(x, MANY), table[:1]),
        (tf.Variable(x),),
        ([np.ones((4, 3)), np.ones(3)],),  # gradients
    ]:
        step()(*args)
    kc.withdevices(lambda x: x, devices=1)(x)


def by_keras(y, p):
    return keras.losses.MeanSquaredError()(y, p)


def by_hand(y, p):
    return tf.reduce_mean((y - p) ** 2)


@pytest.mark.parametrize("loss_of", [by_keras, by_hand])
@pytest.mark.parametrize("sizes", [[1], [MANY - 1, 2 * MANY], [7, 2, 1]])
def test_losses_of_batches_with_few_samples(loss_of, sizes):
    """A replica without samples adds nothing to metrics, such as NaN."""
    metrics = kc.replicate(
        lambda: [
            keras.metrics.Mean(),
            keras.metrics.MeanSquaredError(),
            keras.metrics.F1Score(threshold=0.5),
        ],
        MANY,
    )
    latest = kc.replicate(keras.metrics.Mean, MANY)
    alone = [
        keras.metrics.MeanSquaredError(),
        keras.metrics.MeanSquaredError(),
        keras.metrics.F1Score(threshold=0.5),
    ]

    @kc.withdevices
    def step(y, p):
        loss = loss_of(y, p)
        metrics[0].update_state(loss, sample_weight=len(y))
        latest.reset_state()
        latest.update_state(loss, sample_weight=len(y))
        metrics[1].update_state(y, p)
        metrics[2].update_state(tf.cast(y > 0.5, y.dtype), p)
        return kc.allreduce("mean", loss, weight=len(y))

    rng = np.random.default_rng(0)
    for size in sizes:
        y, p = rng.normal(size=(2, size, 1)).astype("float32")
        loss = float(np.mean((y - p) ** 2))
        assert [*map(float, step(*kc.split((y, p), MANY)))] == pytest.approx(
            [loss] * MANY, rel=1e-5
        )
        assert float(latest.result()) == pytest.approx(loss, rel=1e-5)
        for each in alone[:2]:
            each.update_state(y, p)
        alone[2].update_state((y > 0.5).astype("float32"), p)
    for one, other in zip(metrics, alone, strict=True):
        np.testing.assert_allclose(one.result(), other.result(), rtol=1e-5)
