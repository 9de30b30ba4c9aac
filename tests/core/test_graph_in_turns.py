"""A traced graph runs in turns, and computes what it computes at once."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import DEVICES

from keras_conflux._communication.transports.ops import MAX
from keras_conflux._communication.transports.ops import SUM
from keras_conflux._fit.execution import graph_in_turns
from keras_conflux._fit.execution.graph_in_turns import CannotRunInTurns
from keras_conflux._fit.execution.graph_in_turns import Cut
from keras_conflux._fit.execution.graph_in_turns import TracedTurn

X = np.arange(24, dtype="float32").reshape(6, 4) / 24
OPS = {"sum": SUM, "max": MAX}


def run_in_turns(step, count=3, compiled=False, device=None):
    """Runs `step(x, cut)` in turns, and returns its outputs and the graph."""
    rows = len(X) // count

    @tf.function(jit_compile=compiled, autograph=False)
    def program(x):
        cuts = []

        def turn(x):
            def cut(tensor, op="sum"):
                value = tf.identity(tensor)
                cuts.append(Cut(value, OPS[op], stays_here=False))
                return value

            return step(x, cut)

        traced = tf.function(turn, autograph=False).get_concrete_function(
            tf.TensorSpec([rows, 4])
        )
        graph = traced.graph
        with tf.device(device):
            found = graph_in_turns.run(
                TracedTurn(graph, graph.inputs[:1], cuts, graph.outputs),
                count,
                lambda number: (
                    [x[number * rows : (number + 1) * rows]]
                    if not compiled
                    else [tf.reshape(x, [count, rows, 4])[number]]
                ),
                lambda _, tensors: tensors,
                compiled,
            )
        return found

    found = [each.numpy() for each in program(X)]
    return found, program.get_concrete_function(X).graph


def bodies(graph):
    """Returns the types of the operations of each loop's turns."""
    loops = [op for op in graph.get_operations() if op.type.endswith("While")]
    return [
        [
            op.type
            for op in graph._get_function(
                loop.get_attr("body").name
            ).graph.get_operations()
        ]
        for loop in loops
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_runs_once_keeps_its_order(compiled):
    # Nothing but its order says what is read before it is written.
    state = tf.Variable(1.0)

    def step(x, cut):
        before = state.read_value()
        state.assign(2.0)
        between = state.read_value()
        state.assign(3.0)
        return [before, between, state.read_value(), cut(tf.reduce_sum(x))]

    found, _ = run_in_turns(step, compiled=compiled)
    np.testing.assert_allclose(found, [1, 2, 3, X.sum()], rtol=1e-5)
    assert state.numpy() == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_a_value_that_depends_on_another_reduction(compiled):
    def step(x, cut):
        y = tf.tanh(x)
        largest = cut(tf.reduce_max(y, 0), "max")
        return [cut(tf.reduce_sum(tf.exp(y - largest), 0))]

    (found,), _ = run_in_turns(step, compiled=compiled)
    y = np.tanh(X)
    wanted = np.exp(y - y.max(0)).sum(0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_a_later_loop_computes_anyway_is_not_computed_before():
    def step(x, cut):
        y = tf.tanh(x)
        metric = cut(tf.reduce_sum(y))
        valid = cut(tf.reduce_sum(tf.cast(x > 0.5, "float32")))
        return [metric, cut(tf.reduce_sum(y / valid))]

    (metric, loss), graph = run_in_turns(step)
    np.testing.assert_allclose(metric, np.tanh(X).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        loss, np.tanh(X).sum() / (X > 0.5).sum(), rtol=1e-5
    )
    assert ["Tanh" in body for body in bodies(graph)] == [False, True]


@pytest.mark.parametrize("count", [2, 8])
def test_it_is_told_that_much_is_computed_again(count, caplog):
    def step(x, cut):
        for _ in range(count):
            x = tf.tanh(x - cut(tf.reduce_sum(x)) / 24)
        return [cut(tf.reduce_sum(x))]

    run_in_turns(step)
    assert ("computes 3 times what it has to" in caplog.text) == (count == 8)


def test_a_write_waits_for_loops_that_read():
    weight = tf.Variable(2.0)

    def step(x, cut):
        # A loop reads the variable each time that it runs.
        y = tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, y * weight), (0, x)
        )[1]
        mean = cut(tf.reduce_sum(y)) / 24
        total = cut(tf.reduce_sum(y - mean))
        weight.assign(7.0)
        return [total, weight.read_value()]

    (total, after), _ = run_in_turns(step)
    np.testing.assert_allclose(total, 0, atol=1e-5)
    assert after == 7.0 == weight.numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_are_rounded_once(dtype):
    large = {"bfloat16": 256, "float16": 2048}[dtype]

    def step(x, cut):
        value = tf.where(x[0, 0] == 0, float(large), 1.0)
        return [cut(tf.cast(value, dtype))]

    (found,), _ = run_in_turns(step, count=6)
    assert found.dtype == dtype
    assert found == large + 4  # five ones more, of which no one would count


def test_shapes_that_only_values_tell():
    def step(x, cut):
        rows = tf.boolean_mask(x, x[:, 0] >= 0)
        return [cut(tf.reduce_sum(rows[:, None] * rows, 0))]

    (found,), _ = run_in_turns(step)
    wanted = sum((x[:, None] * x).sum(0) for x in (X[:2], X[2:4], X[4:]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_each_turn_would_write_is_refused():
    weight = tf.Variable(0.0)

    def step(x, cut):
        weight.assign(tf.reduce_sum(x))
        return [cut(tf.reduce_sum(x))]

    with pytest.raises(CannotRunInTurns, match="once"):
        run_in_turns(step)


def test_an_effect_is_not_repeated():
    seen = []

    def step(x, cut):
        y = tf.numpy_function(lambda x: seen.append(1) or x, [x], "float32")
        y.set_shape(x.shape)
        mean = cut(tf.reduce_sum(y)) / 24
        return [cut(tf.reduce_sum(y - mean))]

    with pytest.raises(CannotRunInTurns, match="more than once"):
        run_in_turns(step)
    assert not seen


def test_inputs_that_were_replaced():
    """A condition is given the value of all turns after it was traced."""

    def step(x, cut):
        condition = tf.identity(tf.reduce_sum(x) > 1)
        y = tf.cond(condition, lambda: x * 2, lambda: x)
        everywhere = cut(tf.reduce_sum(x)) > 100
        condition.op._update_input(0, everywhere)
        return [cut(tf.reduce_sum(y))]

    (found,), _ = run_in_turns(step)
    np.testing.assert_allclose(found, X.sum(), rtol=1e-5)


def test_all_runs_on_the_device_of_the_replica():
    """But for what the step itself puts elsewhere."""
    device = DEVICES[-1]

    def step(x, cut):
        total = tf.exp(cut(tf.reduce_sum(tf.tanh(x))))
        with tf.device("CPU:0"):
            return [total, tf.sqrt(total)]

    _, graph = run_in_turns(step, device=device)
    devices = {each.type: each.device for each in graph.get_operations()}
    assert devices["Exp"].endswith(device)
    assert devices["Sqrt"].endswith("CPU:0")
