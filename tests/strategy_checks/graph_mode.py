"""Programs of TensorFlow 1: graphs and sessions."""

import tensorflow as tf

from strategy_checks.programs import FIRST
from strategy_checks.programs import SUM
from strategy_checks.programs import number
from strategy_checks.table import check

v1 = tf.compat.v1


def in_session(build):
    """What a session computes of what `build` returns."""
    with tf.Graph().as_default():
        fetched = build()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return session.run(fetched)


@check()
def a_session_reads_what_replicas_return(strategy):
    def build():
        with strategy.scope():
            made = v1.get_variable("x", initializer=1.0, use_resource=True)
            found = strategy.run(lambda: made + number())
            return strategy.experimental_local_results(found)

    return list(in_session(build))


@check()
def a_session_reduces(strategy):
    def build():
        with strategy.scope():
            found = strategy.run(lambda: number() + 1.0)
            return strategy.reduce("SUM", found, axis=None)

    return in_session(build)


@check(fails="collectives capture what is eager, and a graph has none")
def a_session_counts(strategy):
    def build():
        with strategy.scope():
            made = v1.get_variable(
                "x", initializer=1.0, use_resource=True, aggregation=FIRST
            )
            done = strategy.run(lambda: made.assign_add(number() + 1.0))
            with tf.control_dependencies(
                strategy.experimental_local_results(done)
            ):
                return [copy.read_value() for copy in made.values]

    return list(in_session(build))


@check(fails="collectives capture what is eager, and a graph has none")
def a_session_trains(strategy):
    def build():
        with strategy.scope():
            made = v1.get_variable(
                "x", initializer=1.0, use_resource=True, aggregation=SUM
            )

            def program():
                loss = made * made * (number() + 1.0)
                return made.assign_sub(0.1 * tf.gradients(loss, made)[0])

            done = strategy.run(program)
            return strategy.experimental_local_results(done)

    return list(in_session(build))
