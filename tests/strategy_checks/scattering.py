"""Rows of variables that are written, in replicas and outside of them."""

import tensorflow as tf

from strategy_checks.programs import AGGREGATIONS
from strategy_checks.programs import FIRST
from strategy_checks.programs import MEAN
from strategy_checks.programs import SUM
from strategy_checks.programs import context
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import on_read
from strategy_checks.programs import raised
from strategy_checks.programs import slices
from strategy_checks.programs import variable
from strategy_checks.table import check

METHODS = ("add", "sub", "mul", "div", "min", "max", "update")
REFUSALS = NotImplementedError, ValueError


def add_scattering(method):
    def write(made, values, indices):
        return getattr(made, f"scatter_{method}")(slices(values, indices))

    @check(f"scatter_{method}_in_replicas")
    def in_replicas(strategy):
        found = {}
        for name, aggregation in AGGREGATIONS.items():
            made = variable(strategy, [6.0] * 3, aggregation=aggregation)

            def program(made=made):
                return write(made, [number() + 2.0], [1]) + 0.0

            refused = raised(
                REFUSALS, lambda program=program: in_function(strategy, program)
            )
            found[name] = refused, made
        return found

    @check(f"scatter_{method}_outside")
    def outside(strategy):
        found = {}
        for name, aggregation in AGGREGATIONS.items():
            made = variable(strategy, [6.0] * 3, aggregation=aggregation)
            refused = raised(
                REFUSALS, lambda made=made: write(made, [2.0], [0])
            )
            found[name] = refused, made
        return found


for _method in METHODS:
    add_scattering(_method)


@check()
def replicas_write_rows_of_their_own(strategy):
    found = {}
    for name in ("none", "sum", "mean"):
        made = variable(strategy, [1.0] * 4, aggregation=AGGREGATIONS[name])

        def program(made=made):
            index = context().replica_id_in_sync_group
            rows = tf.stack([index, index + 1])
            return made.scatter_add(slices(tf.stack([1.0, number()]), rows, 4))

        in_function(strategy, program)
        found[name] = made
    return found


@check()
def eager_replicas_write_rows(strategy):
    found = []
    for aggregation in (SUM, MEAN, FIRST):
        made = variable(strategy, [1.0] * 3, aggregation=aggregation)
        strategy.run(
            lambda made=made: made.scatter_add(slices([number() + 1], [1]))
        )
        found.append(made)
    return found


@check()
def integers_are_scattered(strategy):
    made = variable(strategy, [1, 6, 1], aggregation=SUM)

    def program():
        index = context().replica_id_in_sync_group
        return made.scatter_div(slices([index + 1], [1]))

    in_function(strategy, program)
    return made


@check(raises=NotImplementedError)
def rows_of_a_sum_on_read_are_added_to(strategy):
    made = on_read(strategy, [1.0], SUM)
    made.scatter_add(slices([1.0], [0], 1))


@check(raises=NotImplementedError)
def rows_of_a_sum_on_read_are_added_to_in_replicas(strategy):
    made = on_read(strategy, [1.0], SUM)
    strategy.run(lambda: made.scatter_add(slices([1.0], [0], 1)))
