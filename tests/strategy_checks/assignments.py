"""Assignments to variables, in replicas and outside of them."""

import os
import tempfile

import numpy as np
import tensorflow as tf

from strategy_checks.programs import AGGREGATIONS
from strategy_checks.programs import FIRST
from strategy_checks.programs import MEAN
from strategy_checks.programs import NONE
from strategy_checks.programs import SUM
from strategy_checks.programs import both
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import on_read
from strategy_checks.programs import variable
from strategy_checks.table import check

METHODS = ("assign", "assign_add", "assign_sub")


def add_assignments(method, name, aggregation):
    @check(f"{method}_of_{name}_in_replicas")
    def in_replicas(strategy):
        made = variable(strategy, 1.0, aggregation=aggregation)
        write = getattr(made, method)
        returned = both(strategy, lambda: write(number() + 1) + 0.0)
        return returned, made

    if method == "assign_sub":
        return

    @check(f"{method}_of_{name}_outside")
    def outside(strategy):
        made = variable(strategy, 1.0, aggregation=aggregation)
        write = getattr(made, method)
        write(2.0)
        with strategy.scope():
            write(np.float32(3.0))
        tf.function(lambda: write(4.0))()
        return made

    if aggregation == NONE:
        return

    @check(f"{method}_of_{name}_on_read_in_replicas")
    def reduced(strategy):
        # A sum that starts with another number differs.
        made = on_read(strategy, 0.0, aggregation)
        write = getattr(made, method)
        returned = both(strategy, lambda: write(number() + 1) + 0.0)
        return returned, made, made.read_value()


for _method in METHODS:
    for _name, _aggregation in AGGREGATIONS.items():
        add_assignments(_method, _name, _aggregation)


@check()
def a_number_is_not_aggregated(strategy):
    found = []
    for aggregation in (NONE, MEAN, FIRST):
        made = variable(strategy, 0.0, aggregation=aggregation)
        in_function(strategy, lambda made=made: made.assign_add(2.0))
        found.append(made)
    return found


@check(
    raises=ValueError,
    differs="a number of Python that replicas write to a sum is written once",
    here=[2.0] * 3,
)
def a_number_is_added_to_a_sum(strategy):
    made = variable(strategy, 0.0, aggregation=SUM)
    in_function(strategy, lambda: made.assign_add(2.0))
    return made


def add_values_of_no_tensor(name, aggregation):
    @check(f"values_of_no_tensor_to_{name}")
    def values(strategy):
        made = [
            variable(strategy, [1.0, 1.0], aggregation=aggregation)
            for _ in range(4)
        ]

        def program():
            made[0].assign_add(np.float32([1, 2]))
            made[1].assign(np.ones(2, "float32"))
            if aggregation in (NONE, MEAN):  # stock refuses others
                made[2].assign([1.0, number()])
                made[3].assign((number(), 2.0))

        in_function(strategy, program)
        return made


for _name, _aggregation in AGGREGATIONS.items():
    add_values_of_no_tensor(_name, _aggregation)


@check()
def arrays_that_differ_are_aggregated(strategy):
    made = [
        variable(strategy, 0.0, aggregation=each) for each in (MEAN, SUM, FIRST)
    ]

    def program():
        for each in made:
            each.assign(np.float32(number()))

    strategy.run(program)
    return made


@check()
def a_value_is_read_after_its_assignment(strategy):
    made = variable(strategy, 1.0, aggregation=MEAN)

    def program():
        with tf.control_dependencies([made.assign_add(1.0)]):
            return made.value()

    return strategy.run(tf.function(program))


@check()
def assignments_in_a_row(strategy):
    made = variable(strategy, 1.0, aggregation=SUM)
    first = variable(strategy, 1.0, aggregation=FIRST)

    def program():
        made.assign_add(number())
        first.assign(made * (number() + 1))
        made.assign(first + number())
        return made.read_value(), first.read_value()

    return both(strategy, program), made, first


@check()
def the_operation_of_an_assignment(strategy):
    made = variable(strategy, 1.0, aggregation=MEAN)

    def program():
        done = made.assign_add(number(), read_value=False)
        with tf.control_dependencies([done] if done is not None else []):
            return tf.identity(made)

    return in_function(strategy, program)


@check()
def functions_of_version_1_assign(strategy):
    found = []
    for aggregation in (SUM, MEAN, FIRST):
        made = variable(strategy, 1.0, aggregation=aggregation)

        def program(made=made):
            tf.compat.v1.assign_add(made, number())
            tf.compat.v1.assign_sub(made, 2 * number())

        in_function(strategy, program)
        found.append(made)
    return found


@check()
def one_variable_is_assigned_to_another(strategy):
    made, other = variable(strategy, 1.0), variable(strategy, 2.0)
    made.assign(other)
    first = variable(strategy, 0.0, aggregation=FIRST)
    in_function(strategy, lambda: first.assign(other))
    return made, first


@check()
def a_mean_of_equal_copies_is_assigned(strategy):
    made = variable(strategy, 0.0, aggregation=MEAN)
    other = variable(strategy, 2.0, aggregation=MEAN)
    return both(strategy, lambda: made.assign_add(other) + 0.0)


@check()
def a_distributed_value_is_assigned_in_replicas(strategy):
    made = variable(strategy, 0.0, aggregation=SUM)
    given = numbers(strategy)
    return both(strategy, lambda x: made.assign(x) + 0.0, given), made


@check()
def a_sum_on_read_is_assigned_outside(strategy):
    made = on_read(strategy, 0.0, SUM)
    made.assign(9.0)
    before = made.read_value()
    in_function(strategy, lambda: made.assign_add(number()))
    return before, made.read_value()


@check()
def a_mean_on_read_is_assigned_outside(strategy):
    found = []
    for aggregation in (MEAN, FIRST):
        made = on_read(strategy, 0.0, aggregation)
        made.assign(9.0)
        made.assign_add(1.0)
        found.append([made, made.read_value()])
    return found


@check(raises=ValueError)
def a_sum_on_read_is_added_to_outside(strategy):
    made = on_read(strategy, 0.0, SUM)
    made.assign_add(1.0)


@check(raises=ValueError)
def a_sum_on_read_is_subtracted_from_outside(strategy):
    made = on_read(strategy, 0.0, SUM)
    made.assign_sub(1.0)


@check()
def a_counter_of_the_first_replica_in_a_loop(strategy):
    made = variable(strategy, 0, aggregation=FIRST)

    @tf.function
    def count():
        for _ in tf.range(4):
            strategy.run(lambda: made.assign_add(1))

    count()
    return made


@check()
def replicas_count_in_a_loop_of_their_own(strategy):
    made = variable(strategy, 0.0)

    def program():
        for _ in tf.range(3):
            made.assign_add(1.0)
        return made.read_value()

    return tf.function(lambda: strategy.run(program))(), made


@check()
def a_condition_decides_about_an_assignment(strategy):
    made = variable(strategy, 0.0)

    def program():
        if number() > 0:
            made.assign(number())
        return made.read_value()

    return tf.function(lambda: strategy.run(program))(), made


@check()
def init_scope_in_a_replica_makes_and_assigns(strategy):
    made = {}

    def program():
        with tf.init_scope():
            if not made:
                made["v"] = tf.Variable(1.0, aggregation=MEAN)
                made["w"] = tf.Variable(made["v"].read_value() + 1.0)
        return made["v"].assign_add(2.0) + made["w"]

    return strategy.run(tf.function(program)), made


@check()
def a_wrong_shape_is_refused(strategy):
    made = variable(strategy, [1.0, 2.0])
    try:
        made.assign([1.0])
    except ValueError:
        return made
    return "nothing"


@check()
def an_update_of_each_copy(strategy):
    made, given = variable(strategy, 1.0), numbers(strategy)
    update = strategy.extended.update
    together = update(made, lambda copy, x: copy.assign_add(x), args=(given,))
    apart = update(
        made, lambda copy, x: copy.assign_add(x), args=(given,), group=False
    )
    del together
    return apart, made


@check()
def an_update_in_a_function(strategy):
    made, given = variable(strategy, 1.0), numbers(strategy)

    @tf.function
    def run(given):
        strategy.extended.update(
            made, lambda copy, x, y: copy.assign(x + y), (given,), {"y": 2.0}
        )

    run(given)
    return made


@check()
def an_update_of_a_sum(strategy):
    made = on_read(strategy, 0.0, SUM)
    strategy.extended.update(made, lambda copy: copy.assign_add(1.0))
    return made.read_value()


@check()
def a_group_of_what_replicas_return(strategy):
    made = variable(strategy, 0.0, aggregation=MEAN)

    @tf.function
    def run():
        done = strategy.run(lambda: made.assign_add(number()))
        with tf.control_dependencies([tf.group(done)]):
            return made.read_value()

    return run(), made


@check()
def a_distributed_value_is_assigned_outside(strategy):
    made = variable(strategy, 1.0)
    made.assign(numbers(strategy))
    return made


@check(
    differs="a sum that is read has the whole number that it was given",
    here=[7, 14],
)
def a_whole_number_is_assigned_to_a_sum_on_read(strategy):
    made = on_read(strategy, 0, SUM)
    made.assign(7)
    before = made.read_value()
    path = tf.train.Checkpoint(v=made).write(
        os.path.join(tempfile.mkdtemp(), "saved")
    )
    tf.train.Checkpoint(v=made).read(path)
    return before, made.read_value() * 2
