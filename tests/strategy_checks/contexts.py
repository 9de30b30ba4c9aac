"""Which context is open where, and programs in a wrong one."""

import contextlib
import threading

import tensorflow as tf

from strategy_checks.programs import both
from strategy_checks.programs import context
from strategy_checks.programs import each
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import numbers
from strategy_checks.programs import variable
from strategy_checks.table import check

STATE = "strategy", "replica", "across"


def contexts(strategy):
    """What is open here."""
    replica = tf.distribute.get_replica_context()
    return [
        tf.distribute.get_strategy() is strategy,
        tf.distribute.has_strategy(),
        tf.distribute.in_cross_replica_context(),
        replica is not None and replica.strategy is strategy,
    ]


@check()
def contexts_outside_and_in_a_scope(strategy):
    found = [contexts(strategy)]
    with strategy.scope() as entered:
        found += [contexts(strategy), entered is strategy]
        with strategy.scope():
            found.append(contexts(strategy))
        found.append(contexts(strategy))
    return [*found, contexts(strategy)]


@check()
def contexts_in_a_function_and_in_replicas(strategy):
    found = []

    @tf.function
    def run():
        found.append(contexts(strategy))
        strategy.run(lambda: found.append(contexts(strategy)))

    run()
    with strategy.scope():
        run.get_concrete_function()
    return found[:2]


@check()
def contexts_in_a_merge_call(strategy):
    found = []

    def program():
        context().merge_call(lambda given: found.append(contexts(given)))

    strategy.run(program)
    return found


@check()
def a_context_knows_its_replica(strategy):
    def program():
        replica = context()
        return [
            replica.replica_id_in_sync_group + 0,
            tf.constant(replica.num_replicas_in_sync),
            len(replica.devices),
        ]

    return both(strategy, program)


@check()
def a_context_is_of_its_strategy(strategy):
    return strategy.run(lambda: context().strategy is strategy)


@check()
def the_number_of_a_replica_is_used_as_an_index(strategy):
    def program():
        index = context().replica_id_in_sync_group
        return tf.gather([5.0, 6.0, 7.0], index), tf.one_hot(index, 3)

    return both(strategy, program)


@check()
def init_scope_keeps_the_replica(strategy):
    def program():
        with tf.init_scope():
            replica = context()
            return replica is not None and replica.strategy is strategy

    return in_function(strategy, lambda: tf.constant(program()))


@check()
def a_strategy_is_set_for_good(strategy):
    tf.distribute.experimental_set_strategy(strategy)
    try:
        made = tf.Variable(1.0)
        return made, contexts(strategy)
    finally:
        tf.distribute.experimental_set_strategy(None)


@check(raises=RuntimeError)
def a_replica_enters_the_scope(strategy):
    def program():
        with strategy.scope():
            return tf.distribute.in_cross_replica_context()

    return strategy.run(program)


@check(raises=RuntimeError)
def run_in_a_replica_of_a_function(strategy):
    in_function(strategy, lambda: strategy.run(lambda: 1.0))


OUTSIDE = {
    "run": lambda strategy: strategy.run(lambda: 1.0),
    "reduce": lambda strategy: strategy.reduce("SUM", number(), axis=None),
    "reduce_to": lambda strategy: strategy.extended.reduce_to(
        "SUM", number(), "CPU:0"
    ),
    "batch_reduce_to": lambda strategy: strategy.extended.batch_reduce_to(
        "SUM", [(number(), "CPU:0")]
    ),
    "broadcast_to": lambda strategy: strategy.extended.broadcast_to(
        number(), "CPU:0"
    ),
    "gather": lambda strategy: strategy.gather(tf.fill([1], number()), axis=0),
    "data": lambda strategy: strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(3).batch(3)
    ),
    "values": lambda strategy: each(strategy, lambda index: index),
}
"""What replicas may not call."""


def add_refused(name, call):
    @check(f"{name}_in_a_replica", raises=RuntimeError)
    def refused(strategy):
        strategy.run(lambda: call(strategy))


for _name, _call in OUTSIDE.items():
    add_refused(_name, _call)


@check(raises=RuntimeError)
def update_in_a_replica(strategy):
    made = variable(strategy, 1.0)
    strategy.run(
        lambda: strategy.extended.update(made, lambda copy: copy.assign(2.0))
    )


@check()
def the_context_of_replicas_is_not_open_outside(strategy):
    with strategy.scope():
        return context() is None


@check(raises=RuntimeError)
def another_strategy_in_the_scope(strategy):
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope(), other.scope():
        pass


@check(raises=RuntimeError)
def the_scope_in_another_strategy(strategy):
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    with other.scope(), strategy.scope():
        pass


@check(raises=RuntimeError)
def a_scope_in_a_replica_of_another(strategy):
    other = tf.distribute.OneDeviceStrategy("CPU:0")

    def program():
        with other.scope():
            return 1.0

    strategy.run(program)


@check()
def scopes_are_left_after_errors(strategy):
    with contextlib.suppress(KeyError), strategy.scope():
        raise KeyError
    with contextlib.suppress(KeyError):
        strategy.run({}.__getitem__, args=(1,))
    return contexts(strategy)


@check(raises=RuntimeError)
def a_variable_of_another_strategy(strategy):
    other = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    made = variable(other, 1.0)
    strategy.run(lambda: made.assign_add(number()))


@check()
def no_cluster_is_resolved(strategy):
    return strategy.cluster_resolver is None


@check()
def numbers_are_the_same_in_a_scope(strategy):
    outside = strategy.reduce("MEAN", numbers(strategy), axis=None)
    with strategy.scope():
        inside = strategy.reduce("MEAN", numbers(strategy), axis=None)
        run = strategy.run(number)
    return outside, inside, run


@check()
def a_strategy_is_a_mirrored_strategy(strategy):
    return isinstance(strategy, tf.distribute.MirroredStrategy)


@check()
def a_context_of_a_replica_by_hand(strategy):
    made = variable(strategy, 1.0)
    for index, copied in enumerate(made.values):
        copied.assign(float(index))
    with tf.distribute.ReplicaContext(strategy, 1):
        return made.read_value() + 0.0


@check()
def a_scope_in_a_function(strategy):
    made = []

    @tf.function
    def run():
        with strategy.scope():
            if not made:
                made.append(tf.Variable(2.0))
        return strategy.run(lambda: made[0] * number())

    return run(), made


@check()
def a_thread_of_its_own(strategy):
    found = []

    def work():
        found.append(contexts(strategy))
        found.append(strategy.run(number))

    with strategy.scope():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return found


@check()
def contexts_in_a_map_of_data(strategy):
    found = []

    def mapped(x):
        found.append(contexts(strategy))
        return x

    with strategy.scope():
        list(tf.data.Dataset.range(1).map(mapped))
    return found[:1]
