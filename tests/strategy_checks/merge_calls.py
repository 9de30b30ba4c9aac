"""What replicas do together: `merge_call`, and collectives of a context."""

import tensorflow as tf

from strategy_checks.programs import MEAN
from strategy_checks.programs import both
from strategy_checks.programs import context
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import own_row
from strategy_checks.programs import variable
from strategy_checks.table import MEETING
from strategy_checks.table import check

SUM = tf.distribute.ReduceOp.SUM


@check()
def a_merge_call_reduces(strategy):
    def merged(strategy, value):
        assert tf.distribute.in_cross_replica_context()
        return strategy.reduce(SUM, value, axis=None)

    def program():
        return context().merge_call(merged, args=(number() + 1.0,))

    return both(strategy, program)


@check()
def a_merge_call_sees_all_values(strategy):
    seen = []

    def merged(strategy, value, other=None):
        seen.append(strategy.experimental_local_results(value))
        return value, other

    def program():
        return context().merge_call(
            merged, args=(number(),), kwargs={"other": [number() * 2.0]}
        )

    return strategy.run(program), len(seen[0]), len(seen)


@check()
def a_merge_call_updates_a_variable(strategy):
    made = variable(strategy, 1.0)

    def merged(strategy, value):
        extended = strategy.extended
        total = extended.reduce_to(SUM, value, destinations=made)
        extended.update(made, lambda copy, x: copy.assign_add(x), (total,))

    def program():
        context().merge_call(merged, args=(number(),))
        return made.read_value()

    return both(strategy, program), made


@check()
def a_merge_call_reduces_several_values(strategy):
    made = variable(strategy, 0.0)

    def merged(strategy, first, second):
        return strategy.extended.batch_reduce_to(
            SUM, [(first, made), (second, made)]
        )

    def program():
        args = number(), number() * 2.0
        return context().merge_call(merged, args=args)

    return both(strategy, program)


@check()
def two_merge_calls_in_a_row(strategy):
    def merged(strategy, value):
        return strategy.reduce("MEAN", value, axis=None)

    def program():
        first = context().merge_call(merged, args=(number(),))
        return context().merge_call(merged, args=(first * number(),))

    return both(strategy, program)


@check()
def a_merge_call_assigns(strategy):
    made = variable(strategy, 1.0)

    def program():
        context().merge_call(lambda strategy: made.assign(5.0))
        return made.read_value()

    return in_function(strategy, program), made


class Stopped(Exception):
    pass


def stop(*args):
    raise Stopped


@check(raises=Stopped)
def an_error_in_a_merge_call(strategy):
    strategy.run(lambda: context().merge_call(stop))


@check(raises=Stopped)
def an_error_in_a_replica(strategy):
    strategy.run(stop)


@check(raises=Stopped)
def an_error_in_a_replica_of_a_function(strategy):
    in_function(strategy, stop)


@check(raises=Stopped)
def an_error_in_replicas_of_a_merge_call(strategy):
    def merged(strategy):
        return strategy.extended.call_for_each_replica(stop)

    strategy.run(lambda: context().merge_call(merged))


@check()
def the_strategy_works_after_an_error(strategy):
    for program in (stop, lambda: context().merge_call(stop)):
        try:
            strategy.run(program)
        except Stopped:
            continue
    outside = tf.distribute.get_replica_context().strategy is not strategy
    return strategy.run(number), outside


@check()
def an_error_in_one_replica_alone(strategy):
    def program():
        index = tf.get_static_value(context().replica_id_in_sync_group)
        return stop() if index == 1 else index

    try:
        strategy.run(program)
    except Stopped:
        return strategy.run(number)
    return "nothing"


@check()
def all_reduce_of_numbers(strategy):
    return {
        word: both(strategy, lambda word=word: reduced(word, number() + 1.0))
        for word in ("SUM", "MEAN", "sum")
    }


def reduced(word, value):
    return context().all_reduce(word, value)


@check()
def all_reduce_of_an_operation(strategy):
    mean = tf.distribute.ReduceOp.MEAN
    return both(strategy, lambda: reduced(mean, number()))


@check()
def all_reduce_of_trees(strategy):
    def program():
        tree = [number(), {"a": number() + tf.ones(2), "b": (number(),)}]
        return reduced("MEAN", tree)

    return both(strategy, program)


@check()
def all_reduce_of_other_numbers(strategy):
    kinds = tf.float16, tf.float64, tf.int32, tf.int64

    def program():
        return [reduced("SUM", tf.cast(number() + 1.0, d)) for d in kinds]

    return both(strategy, program)


@check()
def all_reduce_of_sparse_values(strategy):
    def program():
        return tf.convert_to_tensor(reduced("SUM", own_row()))

    return in_function(strategy, program)


@check()
def all_reduce_of_a_variable(strategy):
    made = variable(strategy, 2.0)
    return both(strategy, lambda: reduced("SUM", made * number()))


@check()
def all_reduce_with_options(strategy):
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=8)

    def program():
        return context().all_reduce("SUM", [number()] * 3, options=options)

    return both(strategy, program)


@check()
def all_reduce_in_a_loop(strategy):
    @tf.function
    def run():
        def program():
            total = 0.0
            for _ in range(3):
                total += reduced("SUM", number())
            return total

        return strategy.run(program)

    return run()


@check()
def all_reduce_in_a_function_given_to_run(strategy):
    return strategy.run(tf.function(lambda: reduced("SUM", number())))


@check()
def a_gradient_through_all_reduce(strategy):
    def program():
        x = number() + 1.0
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = reduced("SUM", x * x) * (number() + 1.0)
        return tape.gradient(y, x)

    return both(strategy, program)


@check()
def a_gradient_through_a_mean_of_replicas(strategy):
    def program():
        x = number() + 1.0
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = reduced("MEAN", [x * x, x])[0] * (number() + 1.0)
        return tape.gradient(y, x)

    return both(strategy, program)


@check(raises=ValueError)
def all_reduce_of_another_word(strategy):
    strategy.run(lambda: reduced("MAX", number()))


@check()
def an_update_in_a_replica(strategy):
    made = variable(strategy, 1.0, aggregation=MEAN)

    def program():
        total = reduced("SUM", number())
        made.assign(total * 2.0)
        return made.read_value()

    return both(strategy, program)


@check()
def what_one_replica_computes_is_used_by_others(strategy):
    def program():
        chosen = tf.where(number() > 1.0, 7.0, 0.0)
        return reduced("SUM", chosen) + number()

    return both(strategy, program)


@check(raises=RuntimeError)
def all_reduce_in_a_loop_of_a_replica(strategy):
    def program():
        def body(step, total):
            return step + 1, total + reduced("SUM", number())

        return tf.while_loop(lambda step, _: step < 3, body, [0, 0.0])[1]

    return in_function(strategy, program)


@check(raises=RuntimeError, differs=MEETING, here=[3.0] * 3)
def all_reduce_in_a_condition(strategy):
    def program(flag):
        total = lambda: reduced("SUM", number())  # noqa: E731
        return tf.cond(flag, total, lambda: 0.0)

    return in_function(strategy, program, tf.constant(True))


@check(raises=RuntimeError, differs=MEETING, here=[3.0] * 3)
def all_reduce_in_a_function_of_a_replica(strategy):
    total = tf.function(lambda: reduced("SUM", number()))
    return in_function(strategy, lambda: total() + 0.0)


@check(raises=RuntimeError)
def a_mean_is_assigned_in_a_loop_of_a_replica(strategy):
    made = variable(strategy, 0.0, aggregation=MEAN)

    def program():
        def body(step):
            made.assign_add(number())
            return step + 1

        tf.while_loop(lambda step: step < 3, body, [0])
        return made.read_value()

    return in_function(strategy, program)


@check(raises=RuntimeError)
def a_merge_call_in_a_condition(strategy):
    def program(flag):
        merged = lambda: context().merge_call(  # noqa: E731
            lambda strategy, x: x, args=(number(),)
        )
        return tf.cond(flag, merged, lambda: 0.0)

    in_function(strategy, program, tf.constant(True))
