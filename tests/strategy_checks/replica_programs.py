"""Programs of replicas: their arguments, and what TensorFlow runs in them."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from strategy_checks.programs import FIRST
from strategy_checks.programs import both
from strategy_checks.programs import context
from strategy_checks.programs import devices_of
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import variable
from strategy_checks.table import check


@check()
def arguments_by_name_and_by_place(strategy):
    def program(a, b=1.0, *, c):
        return a + b * number() + c["d"][0]

    given = {"b": 2.0, "c": {"d": [numbers(strategy)]}}
    eager = strategy.run(program, args=(1.0,), kwargs=given)
    run = tf.function(lambda: strategy.run(program, (1.0,), given))
    return eager, run()


@check()
def arguments_in_a_list(strategy):
    return strategy.run(lambda a, b: a + b, args=[numbers(strategy), 1.0])


@check()
def a_program_returns_nothing(strategy):
    return both(strategy, lambda: None)


@check()
def a_program_returns_a_tree(strategy):
    def program():
        return [{"a": number(), "b": (number() + 1.0, None)}], ()

    return both(strategy, program)


@check()
def a_program_that_is_a_function(strategy):
    made = variable(strategy, 2.0)
    traces = []

    @tf.function
    def program(x):
        traces.append(1)
        return x * x * made

    given = numbers(strategy)
    first = strategy.run(program, args=(given,))
    strategy.run(program, args=(given,))
    inside = in_function(strategy, program, given)
    return first, inside


@check()
def a_program_calls_a_function(strategy):
    made = variable(strategy, 2.0)
    model = tf.function(lambda x: x * made)
    return both(strategy, lambda x: model(x) + 1.0, numbers(strategy))


@check()
def a_function_in_a_function_knows_its_replica(strategy):
    made = []
    inner = tf.function(lambda: context().replica_id_in_sync_group + 0)

    @tf.function
    def run():
        if not made:
            made.append(tf.Variable(0.0))
        return strategy.run(inner)

    return run()


@check()
def a_program_is_compiled(strategy):
    made = variable(strategy, [1.0, 2.0])

    @tf.function(jit_compile=True)
    def model(x):
        return tf.reduce_sum(made * x)

    return in_function(strategy, lambda x: model(x), numbers(strategy))


@check()
def autograph_converts_a_program(strategy):
    def program(x):
        total = 0.0
        for step in tf.range(3):
            if x > 0.5:
                total += x
            elif step == 2:
                break
        return total

    run = tf.function(lambda x: strategy.run(program, args=(x,)))
    return run(numbers(strategy))


@check()
def autograph_leaves_a_program_alone(strategy):
    @tf.autograph.experimental.do_not_convert
    def program():
        return tf.cond(number() > 0.5, lambda: 1.0, lambda: 2.0)

    return tf.function(lambda: strategy.run(program))()


@check()
def a_program_runs_in_a_loop(strategy):
    made = variable(strategy, 0.0)

    @tf.function
    def run(steps):
        total = 0.0
        for step in tf.range(steps):
            found = strategy.run(
                lambda x: made.assign_add(1.0) * x + number(),
                args=(tf.cast(step, tf.float32),),
            )
            total += strategy.reduce("SUM", found, axis=None)
        return total

    return run(tf.constant(3)), made


@check()
def a_program_runs_in_a_condition(strategy):
    made = variable(strategy, 0.0, aggregation=FIRST)

    @tf.function
    def run(flag):
        if flag:
            strategy.run(lambda: made.assign_add(number() + 1.0))
        return made.read_value()

    return run(tf.constant(True)), run(tf.constant(False))


@check()
def loops_and_lists_in_replicas(strategy):
    def program():
        mapped = tf.map_fn(lambda x: x * number(), tf.range(3.0))
        scanned = tf.scan(lambda a, x: a + x, mapped)
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for index in range(2):
            array = array.write(index, scanned[index])
        looped = tf.while_loop(
            lambda x: x < 5.0, lambda x: [x + number() + 1.0], [0.0]
        )
        return mapped, array.stack(), looped

    return in_function(strategy, program)


@check()
def functions_of_python_in_replicas(strategy):
    def program():
        return tf.numpy_function(np.square, [number()], tf.float32)

    def differentiable():
        return tf.py_function(lambda x: x + 1.0, [number()], tf.float32)

    return both(strategy, program), both(strategy, differentiable)


@check()
def a_custom_gradient_in_replicas(strategy):
    @tf.custom_gradient
    def clipped(x):
        return x * x, lambda upstream: upstream * 10.0

    def program():
        x = number()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = clipped(x) * number()
        return y, tape.gradient(y, x)

    return both(strategy, program)


@check()
def an_assertion_in_replicas(strategy):
    def program(x):
        tf.debugging.assert_less(x, 3.0)
        with tf.control_dependencies([tf.Assert(x >= 0.0, [x])]):
            return tf.square(x)

    return both(strategy, program, numbers(strategy))


@check(raises=tf.errors.InvalidArgumentError)
def an_assertion_fails_in_one_replica(strategy):
    def program(x):
        tf.debugging.assert_less(x, 2.0)
        return x

    in_function(strategy, program, numbers(strategy))


@check()
def a_summary_of_the_first_replica(strategy):
    directory = tempfile.mkdtemp()
    writer = tf.summary.create_file_writer(directory)

    def program():
        with writer.as_default():
            tf.summary.scalar("number", number(), step=0)

    strategy.run(program)
    writer.close()
    count = 0
    for path in tf.io.gfile.glob(f"{directory}/*"):
        for event in tf.compat.v1.train.summary_iterator(path):
            count += len(event.summary.value)
    return count


@check()
def replicas_run_on_their_devices(strategy):
    def program():
        tensor = tf.identity(number() + 1.0)
        with tf.device("CPU:0"):
            return tensor, tf.identity(tensor)

    found = strategy.run(program)
    return [devices_of(strategy, each) for each in found]


@check()
def names_of_operations_in_replicas(strategy):
    def program():
        with tf.name_scope("mine"):
            return tf.constant(1.0, name="one") + 0.0

    return in_function(strategy, program)


@check()
def options_of_a_run(strategy):
    options = tf.distribute.RunOptions(
        experimental_enable_dynamic_batch_size=False
    )
    return strategy.run(number, options=options)


@check()
def functions_run_eagerly(strategy):
    made = variable(strategy, 0.0, aggregation=tf.VariableAggregation.MEAN)
    tf.config.run_functions_eagerly(True)
    try:
        return in_function(strategy, lambda: made.assign_add(number()) + 0.0)
    finally:
        tf.config.run_functions_eagerly(False)


@check()
def the_older_way_to_run(strategy):
    return [
        strategy.extended.call_for_each_replica(
            lambda x, y: x + y + number(), args=(1.0,), kwargs={"y": 2.0}
        )
    ]


@check()
def replicas_write_in_the_order_of_the_program(strategy):
    made = variable(strategy, 1.0)

    def program():
        made.assign(number())
        first = made.read_value()
        made.assign_add(10.0)
        second = made.read_value()
        return first, second

    return both(strategy, program)


@check()
def a_method_of_a_module(strategy):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(2.0)

        @tf.function
        def __call__(self, x):
            return x * self.weight

    with strategy.scope():
        model = Model()
    return both(strategy, model, numbers(strategy))


@check()
def a_result_of_replicas_is_used_as_a_condition(strategy):
    @tf.function
    def run():
        steps, total = 0, tf.constant(0.0)
        while total < 8.0:
            total += strategy.reduce("SUM", strategy.run(number), axis=None)
            steps += 1
        return steps, total

    return run()


@check()
def a_recomputed_function_in_replicas(strategy):
    made = variable(strategy, 3.0)

    def program():
        square = tf.recompute_grad(lambda x: x * x * number())
        x = made.read_value()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = square(x)
        return y, tape.gradient(y, x)

    return in_function(strategy, program)


@check()
def a_function_of_run_itself(strategy):
    return tf.function(strategy.run)(number)


@check()
def a_mean_of_integers(strategy):
    def program(dtype):
        return context().all_reduce("MEAN", tf.cast(number(), dtype))

    run = tf.function(lambda dtype: strategy.run(program, (dtype,)))
    return [
        (each.dtype.name, each)
        for dtype in (tf.uint8, tf.int16, tf.int32, tf.int64)
        for each in strategy.experimental_local_results(run(dtype))
    ]


@check()
def a_concrete_function(strategy):
    given = numbers(strategy)
    run = tf.function(lambda x: strategy.run(tf.square, args=(x,)))
    return run.get_concrete_function(given)(given)


@check()
def a_function_runs_in_several_threads(strategy):
    def program(x):
        for _ in range(4):
            x = context().all_reduce("MEAN", x + number())
        return x

    traced = tf.function(program)
    around = tf.function(lambda x: strategy.run(program, (x,)))

    def calls(thread):
        x = tf.constant(float(thread))
        both_ways = around, lambda x: strategy.run(traced, (x,))
        return [run(x) for _ in range(10) for run in both_ways]

    calls(0)
    with ThreadPoolExecutor(4) as threads:
        return [*threads.map(calls, range(4))]


@check()
def a_function_runs_after_one_has_failed(strategy):
    made = variable(strategy, 1.0)

    @tf.function
    def program(bound):
        tf.debugging.assert_less(number(), bound)
        x = context().all_reduce("SUM", made + number())
        tf.debugging.assert_less(x, bound)
        return context().all_reduce("SUM", x)

    found = []
    for bound in (1e9, 0.0, 1e9, 0.5, 1e9):  # at 0.5 the first one goes on
        for run in (strategy.run, tf.function(strategy.run)):
            try:
                found.append(run(program, (tf.constant(bound),)))
            except tf.errors.InvalidArgumentError:
                found.append("failed")
    return [each for each in found if each != "failed"], len(found)
