"""How variables are made in the scope of a strategy, and read."""

import copy

import numpy as np
import tensorflow as tf

from strategy_checks.programs import AGGREGATIONS
from strategy_checks.programs import FIRST
from strategy_checks.programs import MEAN
from strategy_checks.programs import ON_READ
from strategy_checks.programs import SUM
from strategy_checks.programs import both
from strategy_checks.programs import in_function
from strategy_checks.programs import number
from strategy_checks.programs import on_read
from strategy_checks.programs import variable
from strategy_checks.table import check


@check()
def a_variable_has_a_copy_per_replica(strategy):
    made = variable(strategy, [1.0, 2.0], name="weights")
    copies = strategy.experimental_local_results(made)
    return made, [copy.device for copy in copies], made.name, made.trainable


@check()
def a_variable_says_how_it_was_made(strategy):
    made = variable(strategy, 1.0, aggregation=MEAN, trainable=False)
    told = [made.aggregation.name, made.synchronization.name, made.trainable]
    return [*told, made.dtype.name, made.shape.as_list()]


@check()
def aggregations_are_kept(strategy):
    return [
        variable(
            strategy, 1.0, aggregation=each, synchronization=how
        ).aggregation.name
        for each in AGGREGATIONS.values()
        for how in (tf.VariableSynchronization.AUTO, ON_READ)
    ]


@check()
def a_variable_belongs_to_its_strategy(strategy):
    made, other = variable(strategy, 1.0), tf.Variable(1.0)
    belongs = strategy.extended.variable_created_in_scope
    return [
        belongs(made),
        belongs(other),
        made.distribute_strategy is strategy,
        strategy.extended.value_container(made.values[1]) is made,
    ]


@check()
def a_drawn_value_is_equal_on_all_copies(strategy):
    made = variable(strategy, lambda: tf.random.normal([3]))
    first, *others = strategy.experimental_local_results(made)
    return [np.array_equal(first, other) for other in others]


@check()
def a_function_makes_a_variable_in_replicas(strategy):
    made = []

    def program():
        if not made:
            made.append(tf.Variable(tf.random.normal([])))
        return made[0] + 0.0

    in_function(strategy, program)
    first, *others = strategy.experimental_local_results(made[0])
    return [np.array_equal(first, other) for other in others]


@check()
def eager_replicas_make_one_variable(strategy):
    made = strategy.run(lambda: tf.Variable(3.0))
    return made, isinstance(made, tf.Variable)


@check()
def names_of_variables_in_replicas(strategy):
    def program():
        return [tf.Variable(1.0, name=f"foo_{i}") for i in range(2)]

    with strategy.scope():
        found = strategy.extended.call_for_each_replica(program)
    return [each.name for each in found]


@check()
def names_that_repeat(strategy):
    with strategy.scope():
        made = [tf.Variable(1.0, name="same") for _ in range(2)]
    return [[copy.name for copy in each.values] for each in made]


@check()
def an_initial_value_of_another_variable(strategy):
    first = variable(strategy, 2.0)
    return variable(strategy, first), variable(strategy, first + 1.0)


@check()
def a_variable_without_a_fixed_shape(strategy):
    made = variable(strategy, [1.0], shape=tf.TensorShape(None))
    made.assign([[1.0, 2.0]])
    return made, made.shape.rank


@check()
def a_constraint_is_kept(strategy):
    made = variable(strategy, -1.0, constraint=tf.abs)
    return made.constraint(made)


@check(raises=ValueError)
def a_variable_without_synchronization(strategy):
    variable(strategy, 1.0, synchronization=tf.VariableSynchronization.NONE)


@check(raises=ValueError)
def integers_have_no_mean(strategy):
    variable(strategy, 1, aggregation=MEAN)


@check()
def strings_and_truth_values_are_kept(strategy):
    text, truth = variable(strategy, "a"), variable(strategy, False)
    text.assign("b")
    truth.assign(True)
    return text.numpy(), truth, bool(truth)


@check()
def operators_on_a_variable(strategy):
    floats, whole = variable(strategy, [1.0, -2.0]), variable(strategy, 4)
    return {
        "arithmetic": [floats + 1, 2 - floats, floats * floats, 2**floats],
        "division": [whole // 3, whole % 3, 10 // whole, floats / 2],
        "order": [floats > 0, floats <= 1, whole == 4, whole != 4],
        "parts": [floats[1], floats[:1], abs(floats), -floats],
        "product": tf.tensordot(floats, floats, 1),
    }


@check()
def operators_on_a_variable_in_replicas(strategy):
    made = variable(strategy, [1.0, -2.0])
    return both(strategy, lambda: made * number() + made[0] - abs(made))


@check(
    differs="a variable with copies is a number of Python, as others are",
    here=[False, True],
)
def the_truth_of_a_variable(strategy):
    return [bool(variable(strategy, value)) for value in (0.0, 1.0)]


@check(
    raises=TypeError,
    differs="a variable with copies is a number of Python, as others are",
    here=[1, 1.0, 1.0 + 0.0j],
)
def a_variable_as_a_number_of_python(strategy):
    made = variable(strategy, 1)
    return [int(made), float(made), complex(made)]


@check()
def a_variable_as_an_array(strategy):
    made = variable(strategy, [1.0, 2.0])
    arrays = [np.asarray(made), np.array(made) * 2, np.stack([made, made])]
    return [*arrays, np.float64(2) * made, made.numpy()]


@check()
def a_variable_as_a_tensor(strategy):
    made = variable(strategy, [1.0, 2.0])
    read = [made.value(), made.read_value(), tf.identity(made)]
    return [*read, tf.convert_to_tensor(made), tf.cast(made, tf.int32)]


@check()
def a_variable_is_iterated_over(strategy):
    return list(variable(strategy, [1.0, 2.0]))


@check()
def rows_of_a_variable_are_looked_up(strategy):
    made = variable(strategy, [[1.0, 2.0], [3.0, 4.0]])
    looked_up = tf.nn.embedding_lookup(made, [1, 1, 0])
    inside = both(strategy, lambda: tf.gather(made, [1]))
    return looked_up, inside


@check()
def a_variable_is_a_key_by_its_reference(strategy):
    made = variable(strategy, 1.0)
    return {made.ref(): 1}[made.ref()], made.ref().deref() is made


@check()
def a_variable_is_initialized(strategy):
    return variable(strategy, 1.0).is_initialized()


@check()
def a_variable_is_copied(strategy):
    made = variable(strategy, 1.0)
    with strategy.scope():
        copied = copy.deepcopy(made)
    made.assign(2.0)
    return copied, copied is made


@check()
def a_copy_is_read_in_a_replica(strategy):
    made = variable(strategy, 1.0)
    for index, copied in enumerate(made.values):
        copied.assign(float(index))
    read = both(strategy, lambda: [made.read_value(), made.value(), made + 0])
    return read, made.read_value()


@check()
def a_variable_of_one_device_is_read_in_replicas(strategy):
    outside = tf.Variable(2.0)
    return both(strategy, lambda: outside + number())


@check()
def replicas_are_given_a_variable(strategy):
    made = variable(strategy, 2.0)
    return in_function(strategy, lambda given: given * number(), made)


@check()
def replicas_write_a_variable_that_they_are_given(strategy):
    made = variable(strategy, 2.0, aggregation=SUM)
    strategy.run(lambda given: given.assign_add(number()), args=(made,))
    return made


@check()
def a_variable_beside_another(strategy):
    made = variable(strategy, 1.0)
    with strategy.scope(), strategy.extended.colocate_vars_with(made):
        beside = tf.Variable(2.0)
    return [copied.device for copied in beside.values]


@check()
def a_creator_of_variables_is_asked_once(strategy):
    asked = []

    def creator(following, **options):
        asked.append(options["name"])
        return following(**options)

    with strategy.scope(), tf.variable_creator_scope(creator):
        tf.Variable(1.0, name="mine")
    return asked


@check()
def a_module_knows_its_variables(strategy):
    module = tf.Module()
    with strategy.scope():
        module.weights = [tf.Variable(1.0), tf.Variable(2.0, trainable=False)]
    return [module.variables, module.trainable_variables]


@check()
def tables_are_made_in_the_scope(strategy):
    with strategy.scope():
        fixed = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1
        )
        changing = tf.lookup.experimental.MutableHashTable(
            tf.string, tf.int64, -1
        )
    changing.insert(["a"], tf.constant([3], tf.int64))

    def program():
        keys = tf.constant(["a", "z"])
        return fixed.lookup(keys), changing.lookup(keys)

    return both(strategy, program)


@check(
    differs="the initial value of a sum that is read counts once",
    here=[3.0, [3.0, 0.0, 0.0]],
)
def a_sum_on_read_starts_once(strategy):
    made = on_read(strategy, 3.0, SUM)
    return made.read_value(), made


@check()
def copies_are_reduced_when_they_are_read(strategy):
    found = {}
    for name in ("sum", "mean", "first"):
        made = on_read(strategy, 0.0, AGGREGATIONS[name])
        in_function(strategy, lambda made=made: made.assign_add(number() + 1))
        read = tf.function(lambda made=made: made.read_value() + made)
        found[name] = [made.read_value(), made + 0, read(), made.numpy(), made]
    return found


@check()
def a_replica_reads_its_copy_of_a_sum(strategy):
    made = on_read(strategy, 0.0, SUM)

    def program():
        made.assign_add(number() + 1)
        return made.read_value()

    return both(strategy, program)


@check(raises=ValueError)
def copies_without_a_reduction_are_read(strategy):
    made = variable(strategy, 0.0, synchronization=ON_READ)
    made.read_value()


@check()
def the_extended_part_reads_a_variable(strategy):
    read = strategy.extended.read_var
    made = on_read(strategy, 3.0, FIRST)
    strategy.run(lambda: made.assign_add(number() + 1))
    return read(made), read(variable(strategy, 2.0))


@check()
def a_moving_average_of_a_variable(strategy):
    made = variable(strategy, 10.0)
    with strategy.scope():
        average = tf.train.ExponentialMovingAverage(0.5)

    def program():
        average.apply([made])

    step = tf.function(lambda: strategy.run(program))
    step()
    made.assign(20.0)
    step()
    return average.average(made)


@check()
def a_variable_and_its_handle_in_a_replica(strategy):
    made = variable(strategy, 1.0)

    def program():
        tf.raw_ops.AssignAddVariableOp(resource=made.handle, value=number())

    in_function(strategy, program)
    return made


@check()
def a_string_of_a_variable_does_not_fail(strategy):
    made = variable(strategy, 1.0)
    return [text.count("numpy=1.0") for text in (repr(made), str(made))]


@check()
def a_handle_outside_of_replicas(strategy):
    return variable(strategy, 1.0).handle.dtype.name
