"""Each mechanism, switched off, makes tests fail that pass with it.

The comparison with one device is worth as much as it notices. Here each
mechanism in turn is replaced by a fault, and the tests that are named beside
the fault must fail, by an assertion and not by a crash.
"""

import copy
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_batches
import test_callbacks
import test_collectives
import test_eager
import test_equal
import test_fit
import test_global_batch
import test_graph_in_turns
import test_layer_state
import test_microbatches
import test_moving_averages
import test_random_draws
import test_stand_ins
import test_synchronization
import test_withdevices
from cases import CASES
from conftest import ON_GPU
from conftest import several
from models import Keeps
from models import assert_same_outcome
from models import outcome
from models import regression

import keras_conflux as kc
from keras_conflux._communication.transports.ops import SUM
from keras_conflux._compat.private_keras_names import Patched

pytestmark = [
    several,
    pytest.mark.skipif(ON_GPU, reason="patches what runs on CPU devices"),
]

FIT = "keras_conflux._fit"
NUMERICS = f"{FIT}.numerics"
REPLICATION = "keras_conflux._replication"
COLLECTIVES = "keras_conflux._communication.tree_collectives:ReplicaCollectives"

# Where the mechanisms are. Nothing else in this file names the insides of the
# package, or the methods of Keras that the package replaces.
PLACES = {
    # of the package
    "accumulates": f"{NUMERICS}.updates:_accumulates",
    "accumulators": "keras_conflux._compat.keras_models:accumulators",
    "average": f"{NUMERICS}.writes:Writes._reduce_by_change",
    "compiles": f"{FIT}.input.execution_plan:compiles",
    "compiles a shape": (
        f"{FIT}.execution.step_executor:StepExecutor._is_worth_compiling"
    ),
    "chain rule": f"{NUMERICS}.tape:_through_reductions",
    "change of a metric": f"{NUMERICS}.late_writes:_share_of_change",
    "copies": f"{REPLICATION}.state:copies",
    "count": f"{NUMERICS}.late_writes:own_share",
    "gather": f"{NUMERICS}.global_values:gathered",
    "logs": f"{NUMERICS}.returns:Logs.merged",
    "make global": f"{NUMERICS}.gradients:_made_global",
    "move a batch": f"{FIT}.input.batch_sharder:BatchSharder._one",
    "promote": f"{REPLICATION}.promotion:_promote_variable",
    "reduce": f"{COLLECTIVES}._reduce",
    "reduce a tree": f"{COLLECTIVES}.all_reduce",
    "sum gradients": f"{NUMERICS}.gradients:summed",
    "reduce sparse": f"{COLLECTIVES}._reduce_sparse",
    "collectives": f"{REPLICATION}.strategy:replica_collectives",
    "role of a log": f"{NUMERICS}.returns:_role_and_value",
    "seed of a loss": f"{NUMERICS}.tape:_seeded",
    "sources": f"{NUMERICS}.global_values:reduced_by_role",
    "state": f"{NUMERICS}.writes:global_values",
    "slices of the gathered": f"{NUMERICS}.gathered_rows:GatheredRows.own",
    "send": f"{COLLECTIVES}.broadcast",
    "set a sum": "keras_conflux._compat.replicated_variables:set_sum",
    "has samples": "keras_conflux._custom_loops.verbs:has_samples",
    "fractions": f"{FIT}.execution.graph_program:batch_fractions",
    "values of logs": f"{NUMERICS}.returns:global_values",
    "values of counts": f"{NUMERICS}.late_writes:global_values",
    "steers": f"{FIT}.input.execution_plan:may_steer_data",
    "sum with weights": f"{COLLECTIVES}.weighted_sum",
    "synchronize": f"{REPLICATION}.synchronization:synchronize",
    "exchange of turns": f"{FIT}.execution.graph_in_turns:_exchange",
    "numbers of a turn": f"{FIT}.execution.microbatches:_Uneven.known_from",
    "rank of a turn": f"{FIT}.execution.microbatches:TracedTurns.begin",
    "runner of turns": f"{FIT}.execution.graph_in_turns:_Runner.__init__",
    "samples of a turn": f"{FIT}.execution.microbatches:_Uneven.__call__",
    "sum over turns": f"{FIT}.execution.microbatches:TracedTurns.summed_here",
    "writes between turns": (
        f"{FIT}.execution.graph_in_turns:_Plan._written_too_early"
    ),
    "weigh": "keras_conflux._communication.dtypes:weighted",
    "without stand-ins": f"{NUMERICS}.returns:_if_any",
    # of Keras, replaced by the package
    "add": Patched.ASSIGN_ADD.path,
    "assign": Patched.ASSIGN.path,
    "clip": Patched.CLIP_GRADIENTS.path,
    "divide loss": Patched.SCALE_LOSS.path,
    "mask": Patched.APPLY_MASK.path,
    "moments": Patched.SYNCHRONIZED_MOMENTS.path,
    "reduce in Keras": Patched.SUM_GRADIENTS.path,
    "reduce losses": Patched.REDUCE_VALUES.path,
    "draw": Patched.NORMAL.path,
    "drop": Patched.DROPOUT.path,
    "rows that are drawn": f"{NUMERICS}.drawn_rows:DrawnRows._begins",
    "use of rows": f"{NUMERICS}.draws:are_of_a_sample",
    "turns of a loop": f"{NUMERICS}.inner_graphs:_Loop.note_turns",
    "seed": Patched.NEXT_SEED.path,
    "show loss": Patched.UNSCALE_LOSS.path,
    "update mean": Patched.MEAN_UPDATE.path,
    "write rows": Patched.OPTIMIZER_ASSIGN_SUB.path,
}


def find(place: str) -> tuple:
    """Returns what holds the function at a place, and under which name."""
    module, path = PLACES[place].split(":")
    owner = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    if isinstance(owner, type):
        owner = next(each for each in owner.__mro__ if name in vars(each))
    return owner, name


def call(place: str, *args):
    owner, name = find(place)
    return getattr(owner, name)(*args)


def assert_equal_after_xla() -> None:
    """Copies are equal when `fit` returns, though XLA lets them come apart.

    XLA has no collectives between CPU devices: the step runs as a graph here.
    """

    def come_apart(kept, x):
        if tf.distribute.get_replica_context() is not None:
            kept.value.assign_add(tf.fill(x.shape[1:], 1e-7 * _replica()))

    model = keras.Sequential([Keeps(come_apart), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kc.replicate(model, 2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(*find("compiles"), lambda *_: True)
        monkeypatch.setattr(*find("compiles a shape"), lambda *_: False)
        model.fit(*regression(8), verbose=0)
    kc.assert_in_sync(model)


def assert_equal_with_known_sizes(name: str) -> None:
    """Runs a case where no graph tells how a value is made of samples."""
    fit = CASES[name].fit()
    weights = fit.pop("sample_weight", None)
    leaves = (fit.pop("x"), fit.pop("y"))
    leaves = leaves if weights is None else (*leaves, weights)
    data = tf.data.Dataset.from_tensor_slices(leaves)
    data = data.batch(fit.pop("batch_size"), drop_remainder=True)

    def prepare(model):
        step = model.train_step

        def step_of_known_size(batch):
            int(batch[0].shape[0])  # raises where it is not known
            return step(batch)

        model.train_step = step_of_known_size

    def trained(count=None):
        model = CASES[name].build()
        if count:
            kc.replicate(model, count)
        prepare(model)
        history = model.fit(data, epochs=1, verbose=0)
        return outcome(model, history)

    assert_same_outcome(trained(), trained(2), CASES[name].rtol)


def assert_equal_in_turns(build: Callable) -> None:
    """Trains a model in two turns on each of two devices."""
    expected = test_microbatches.trained(build)
    got = test_microbatches.trained(build, 2, microbatches=2)
    assert_same_outcome(expected, got)


def drops_and_counts() -> keras.Model:
    dropout = keras.layers.Dropout(0.5, seed=1)
    layers = [keras.Input((8,)), dropout, keras.layers.Dense(1)]
    hits = keras.metrics.TruePositives(0.1, name="hits")
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=[hits], jit_compile=False)
    return model


def _loss(name: str) -> Callable:
    return functools.partial(test_global_batch.test_loss, name)


def _state(update: Callable) -> Callable:
    return functools.partial(test_global_batch.test_state, update)


def _drawn(name: str) -> Callable:
    return functools.partial(
        test_random_draws.test_a_model_draws_as_one_device_does, name
    )


# Tests beside the cases of `test_equal.py`.
TESTS = {
    "copies after XLA": assert_equal_after_xla,
    "random numbers": test_fit.test_dropout_differs_between_replicas,
    "sums of a layer, known sizes": functools.partial(
        test_layer_state.test_what_a_layer_keeps,
        test_layer_state._sums_of_known_size,
        False,
    ),
    "synchronized normalization in a step of one's own": functools.partial(
        test_layer_state.test_synchronized_normalization_in_a_step_of_ones_own,
        7,
    ),
    "broadcast": functools.partial(
        test_collectives.test_one_replica_updates_and_sends_what_it_has, 2
    ),
    "NaN of weight 0": functools.partial(
        test_collectives.test_weighted_mean_ignores_nan_of_weight_zero, 2, True
    ),
    "gradient of a sum": functools.partial(
        test_collectives.test_gradient_is_the_finite_difference, 2, "sum", False
    ),
    "rows that repeat": (
        test_synchronization.test_rows_that_repeat_leave_copies_equal
    ),
    "noise": _drawn("noise"),
    "dropout": _drawn("dropout"),
    "two views": _drawn("two views"),
    "several rows of each sample": _drawn("several rows of each sample"),
    "two rows or two batches": _drawn("two rows or two batches"),
    "draws in a loop over samples": (
        test_random_draws.test_replicas_draw_apart_what_is_not_known_to_be_of_one_device
    ),
    "rows of one sample, joined": functools.partial(
        test_stand_ins.test_what_is_joined, 0, 1
    ),
    "rows of a prediction": functools.partial(
        test_batches.test_predict_of_any_number_of_rows, tf.identity, 1
    ),
    "loss that is a sum": _loss("sum"),
    "loss that is a mean": _loss("mean"),
    "loss that is a ratio": _loss("ratio of sums"),
    "loss that compares samples": _loss("contrastive of two kinds"),
    "statistics of a replica": (
        test_moving_averages.test_statistics_of_a_replicas_own_samples_are_averaged
    ),
    "state that is a sum": _state(test_global_batch._sum_by_assign),
    "state that is a codebook": _state(test_global_batch._codebook),
    "state that is a queue": _state(test_global_batch._queue),
    "gradients by hand": test_global_batch.test_gradients_by_hand,
    "metric of means": functools.partial(
        test_global_batch.test_metric_of_batches, test_global_batch.OfMeans
    ),
    "value per sample in logs": functools.partial(
        test_global_batch.test_logs, test_global_batch.OwnLogs
    ),
    "ignored classes, known sizes": functools.partial(
        assert_equal_with_known_sizes, "ignored classes"
    ),
    "mean with weights, known sizes": functools.partial(
        assert_equal_with_known_sizes, "loss mean_with_sample_weight"
    ),
    "accumulation, eagerly": functools.partial(
        test_eager.test_a_program, "accumulation", 2
    ),
    "sum, known sizes": functools.partial(
        assert_equal_with_known_sizes, "loss sum"
    ),
    "step in turns": functools.partial(assert_equal_in_turns, drops_and_counts),
    "loss that compares samples, in turns": functools.partial(
        assert_equal_in_turns, test_microbatches.contrastive
    ),
    "phases of turns": functools.partial(
        test_graph_in_turns.test_a_value_that_depends_on_another_reduction,
        False,
    ),
    "reads between turns": (
        test_graph_in_turns.test_a_write_waits_for_loops_that_read
    ),
    "steered data": functools.partial(
        test_callbacks.test_what_a_callback_tells_a_generator_is_in_the_next_batch,
        2,
    ),
    "loop with a weighted mean": functools.partial(
        test_withdevices.test_custom_loop_equals_one_device, 2
    ),
}


def run(name: str) -> None:
    """Runs a case on two devices, or one of `TESTS`."""
    if name in TESTS:
        TESTS[name]()
        return
    expected = test_equal.on_one_device(name, epochs=1)
    got = test_equal.train(name, count=2, epochs=1)
    assert_same_outcome(expected, got, CASES[name].rtol)


@functools.cache
def assert_passes(name: str) -> None:
    run(name)


AS_KERAS_HAS_IT = "as Keras has it"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the tests that notice it."""

    name: str
    planted: dict[str, Callable | str]
    """By place, what is called instead, with the original first."""
    red: tuple[str, ...]
    """Cases of `cases.py` and names in `TESTS`."""


def _replica() -> int:
    context = tf.distribute.get_replica_context()
    if context is None:  # while Keras builds the model
        return 0
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def _equal_weight(*_):
    return tf.constant(1 / 2)


def _local_gradients(original, grads, sources, context):
    context.kinds.mark_equal(grads)
    return grads


def _weighted_late(original, grads, sources, context):
    weight = context.batch_fraction
    grads = call("collectives").weighted_sum(grads, weight)
    context.kinds.mark_equal(grads)
    return grads


def _clip_first(original, grads, sources, context):
    grads, _ = tf.clip_by_global_norm(grads, 0.05)
    return original(grads, sources, context)


def _reduce_again(original, grads, *_):
    return original(call("collectives").all_reduce("sum", grads), *_)


def _as_mean(original, target, seed, sources, context):
    fraction = tf.cast(context.batch_fraction, target.dtype)
    return [(target, tf.ones_like(target) * fraction)]


def _chain_rule_skipped(original, target, sources, mixed, context):
    return _as_mean(original, target, None, sources, context)


def _unchanged(original, tensors, context):
    return tensors


def _reversed(original, sources, context):
    found = [copy.copy(rows) for rows in original(sources, context)]
    for rows in found:
        rows.all = tf.reverse(rows.all, [rows._axis])
    return found


def _counts_stand_ins(context):
    fraction = tf.maximum(context.batch_fraction, 1e-12)
    return dataclasses.replace(context, batch_fraction=fraction)


def _finite_somewhere(original, self, op, *args):
    return original(self, "max" if op == "min" else op, *args)


def _logs_of_first(original, logs, outputs, *_):
    return outputs[0]


def _no_weight(original, self, op, tree, *_, **__):
    return original(self, op, tree)


def _on_replica_0(original, metric, *args, **kwargs):
    return original(metric, *args, **kwargs) if _replica() == 0 else None


def _local_moments(original, x, axes, keepdims):
    return tf.nn.moments(x, axes, keepdims=keepdims)


def _last_copy_differs(original, variable, summed):
    original(variable, summed)
    if variable.name == "kernel":
        call("copies", variable)[-1].assign_add(
            tf.fill(variable.shape, np.float32(0.01))
        )


def _set_each_copy(original, variable, value):
    for each in variable.values:
        each.assign(tf.cast(value, each.dtype))


def _of_batch(change):
    def move(original, self, batch, spec):
        changed = [None if x is None else change(x) for x in batch]
        return original(self, type(batch)(changed), spec)

    return move


def _one_turn_less(original, self, traced, count, *rest):
    original(self, traced, count - 1, *rest)


def _of_this_replica(original, given, everywhere, known):
    original(given, lambda op, tensors: tensors, known)


def _first_rows(original, self, numbers):
    rank, fraction, own, before, total, size = numbers
    return original(self, (rank, fraction, own, 0 * before, total, size))


def _first_samples(original, self, number):
    samples = len(self._leaves)
    first, given = original(self, 0 * number), original(self, number)
    return [*first[:samples], *given[samples:]]


def _turns_weigh_alike(original, self, numbers):
    rank, fraction, *rest = numbers
    fraction = tf.ones_like(fraction) / (2 * self._count)
    return original(self, (rank, fraction, *rest))


def _local_gradient(original, self, op, x):
    # The value of the reduction, and the gradient of doing nothing.
    return x + tf.stop_gradient(original(self, op, x) - x)


FAULTS = [
    # Gradients.
    Fault(
        "gradients are not reduced",
        {"sum gradients": _local_gradients},
        ("optimizer SGD", "own train_step"),
    ),
    Fault(
        "gradients by hand are not reduced",
        {"make global": lambda original, grads, step: grads},
        ("gradients by hand",),
    ),
    Fault(
        "gradients of a tape are reduced once more",
        {"sum gradients": _reduce_again},
        ("optimizer SGD",),
    ),
    Fault(
        "gradients are clipped before they are reduced",
        {"sum gradients": _clip_first},
        ("clipnorm", "global_clipnorm"),
    ),
    Fault(
        "a mean is differentiated as a sum",
        {"seed of a loss": lambda original, target, *_: [(target, None)]},
        ("optimizer SGD", "optimizer Adadelta", "loss that is a mean"),
    ),
    Fault(
        "a sum is differentiated as a mean",
        {"seed of a loss": _as_mean},
        ("loss that is a sum",),
    ),
    Fault(
        "the loss gets its weight after it is differentiated",
        {
            "seed of a loss": lambda original, target, *_: [(target, None)],
            "sum gradients": _weighted_late,
        },
        (
            "convolution and synchronized statistics",
            "synchronized normalization in a step of one's own",
        ),
    ),
    Fault(
        "what is not linear is differentiated as a mean",
        {"chain rule": _chain_rule_skipped},
        ("loss that is a ratio", "loss that compares samples"),
    ),
    Fault(
        "a sample gets the gradient of another",
        {
            "slices of the gathered": lambda original, self, gathered: original(
                self, tf.reverse(gathered, [0])
            )
        },
        ("loss that compares samples",),
    ),
    Fault(
        "gradients are reduced twice",
        {"reduce in Keras": AS_KERAS_HAS_IT},
        ("optimizer SGD",),
    ),
    Fault(
        "each replica counts alike, whatever samples it has",
        {"fractions": lambda original, sizes: [_equal_weight() for _ in sizes]},
        ("optimizer SGD",),
    ),
    Fault(
        "sparse gradients are not gathered",
        {"reduce sparse": lambda original, self, op, leaf, *_: leaf},
        ("embedding with sparse gradients and clipping",),
    ),
    Fault(
        "rows of a sparse gradient are written in any order",
        {"write rows": AS_KERAS_HAS_IT},
        ("rows that repeat",),
    ),
    Fault(
        "the gradient of a reduction stays on its replica",
        {"reduce": _local_gradient},
        ("gradient of a sum", "convolution and synchronized statistics"),
    ),
    Fault(
        "a mean ignores the weights of a user",
        {"reduce a tree": _no_weight},
        ("loop with a weighted mean",),
    ),
    Fault(
        "what has no weight counts if it is NaN",
        {
            "weigh": lambda original, leaf, weight: (
                leaf if weight is None else leaf * tf.cast(weight, leaf.dtype)
            )
        },
        ("NaN of weight 0",),
    ),
    # Accumulation.
    Fault(
        "accumulated gradients are not reduced",
        {"clip": AS_KERAS_HAS_IT},
        ("accumulation of 2",),
    ),
    Fault(
        "gradients are reduced at each micro-step",
        {"accumulates": lambda *_: False},
        ("accumulation of 5",),
    ),
    Fault(
        "what a replica has accumulated is taken for the sum",
        {"accumulators": lambda *_: []},
        ("accumulation of 5",),
    ),
    Fault(
        "each copy of a sum gets all of it",
        {"set a sum": _set_each_copy},
        ("accumulation, eagerly",),
    ),
    Fault(
        "gradients count as finite if one replica's are",
        {"reduce a tree": _finite_somewhere},
        ("overflow on one replica while accumulating",),
    ),
    # Losses.
    Fault(
        "the loss is divided by the number of replicas",
        {"divide loss": AS_KERAS_HAS_IT},
        ("optimizer SGD",),
    ),
    Fault(
        "the shown loss is multiplied by the number of replicas",
        {"show loss": AS_KERAS_HAS_IT},
        ("optimizer SGD",),
    ),
    Fault(
        "each replica divides by the entries of its own mask",
        {"mask": AS_KERAS_HAS_IT},
        ("ignored classes, known sizes",),
    ),
    Fault(
        "each replica divides by its own sample weights",
        {"reduce losses": AS_KERAS_HAS_IT},
        ("mean with weights, known sizes", "sum, known sizes"),
    ),
    # Layers.
    Fault(
        "what a step sets is not reduced",
        {"state": _unchanged},
        ("state that is a sum", "state that is a codebook"),
    ),
    Fault(
        "rows are gathered in another order",
        {"gather": _reversed},
        ("state that is a queue",),
    ),
    Fault(
        "stand-ins for samples count in what is reduced",
        {
            "sources": lambda original, sources, context: original(
                sources, _counts_stand_ins(context)
            )
        },
        ("state that is a sum", "state that is a codebook"),
    ),
    Fault(
        "synchronized moments are those of a replica",
        {"moments": _local_moments},
        ("convolution and synchronized statistics",),
    ),
    Fault(
        "moving averages are not averaged over the replicas",
        {"average": lambda *_: None},
        ("statistics of a replica",),
    ),
    Fault(
        "moving averages are averaged without weights",
        {
            "sum with weights": lambda original, self, tree, _: original(
                self, tree, _equal_weight()
            )
        },
        ("statistics of a replica",),
    ),
    Fault(
        "what layers write is not noticed",
        {"assign": AS_KERAS_HAS_IT},
        ("moving average of a layer",),
    ),
    Fault(
        "what layers add up is not noticed where no graph tells",
        {"add": AS_KERAS_HAS_IT},
        ("sums of a layer, known sizes",),
    ),
    Fault(
        "all replicas draw the same random numbers",
        {"seed": AS_KERAS_HAS_IT},
        ("random numbers",),
    ),
    # Metrics.
    Fault(
        "metrics are those of replica 0",
        {"update mean": _on_replica_0},
        ("optimizer SGD",),
    ),
    Fault(
        "callbacks get the logs of replica 0",
        {"logs": _logs_of_first},
        ("optimizer SGD", "own train_step"),
    ),
    Fault(
        "what a step returns is taken to be equal on all replicas",
        {"role of a log": lambda original, leaf, *_: ("first", leaf)},
        ("value per sample in logs",),
    ),
    Fault(
        "what a step returns is not computed from all samples",
        {"values of logs": _unchanged},
        ("loss that is a mean",),
    ),
    Fault(
        "what a metric counts is not computed from all samples",
        {"values of counts": _unchanged},
        ("loss that is a ratio",),
    ),
    Fault(
        "a mean in a metric counts a replica, not its samples",
        {"change of a metric": lambda original, change, *_: change},
        ("metric of means",),
    ),
    Fault(
        "metrics count what a replica without samples ran on",
        {
            "count": lambda original, variable, value, step, *rest: original(
                variable,
                value,
                dataclasses.replace(step, may_be_empty=False),
                *rest,
            )
        },
        ("last batch of one sample",),
    ),
    # Turns, in which a replica runs its shard.
    Fault(
        "a replica runs one turn less than it has",
        {"runner of turns": _one_turn_less},
        ("phases of turns", "step in turns"),
    ),
    Fault(
        "turns reduce, and replicas do not",
        {"exchange of turns": _of_this_replica},
        ("step in turns",),
    ),
    Fault(
        "what a replica counts in its turns is summed over replicas",
        {"sum over turns": lambda _, self, x: self.all_reduce(x, 0, SUM)},
        ("step in turns",),
    ),
    Fault(
        "each turn runs on the first samples",
        {"samples of a turn": _first_samples},
        ("step in turns",),
    ),
    Fault(
        "turns weigh alike, whatever samples they have",
        {"numbers of a turn": _turns_weigh_alike},
        ("step in turns",),
    ),
    Fault(
        "each turn draws the rows of the first samples",
        {"numbers of a turn": _first_rows},
        ("step in turns",),
    ),
    Fault(
        "each turn takes itself for the first",
        {"rank of a turn": lambda original, self, x: original(self, 0 * x)},
        ("loss that compares samples, in turns",),
    ),
    Fault(
        "a variable is written before a later loop has read it",
        {"writes between turns": lambda *_: {}},
        ("reads between turns",),
    ),
    # Copies and data.
    Fault(
        "predictions are joined with those of replicas without samples",
        {"without stand-ins": lambda original, leaf, size: leaf},
        ("rows of a prediction",),
    ),
    Fault(
        "copies begin with other values",
        {"promote": _last_copy_differs},
        ("optimizer SGD",),
    ),
    Fault(
        "copies stay as XLA leaves them",
        {"synchronize": lambda *_: None},
        ("copies after XLA",),
    ),
    Fault(
        "a batch is drawn before callbacks have seen the one before it",
        {"steers": lambda *_: False},
        ("steered data",),
    ),
    Fault(
        "a broadcast sends what another replica has",
        {"send": lambda original, self, tree, root: original(self, tree, 1)},
        ("broadcast",),
    ),
    Fault(
        "replicas draw what each would draw alone",
        {"draw": AS_KERAS_HAS_IT},
        ("noise",),
    ),
    Fault(
        "replicas drop what each would drop alone",
        {"drop": AS_KERAS_HAS_IT},
        ("dropout",),
    ),
    Fault(
        "each replica draws the first rows",
        {
            "rows that are drawn": lambda original, self: [
                0 * begin for begin in original(self)
            ]
        },
        ("dropout", "two views"),
    ),
    Fault(
        "twice as many rows as samples are always those of two batches",
        {"use of rows": lambda *_: False},
        ("several rows of each sample", "two rows or two batches"),
    ),
    Fault(
        "each loop is taken to go around equally often on all replicas",
        {"turns of a loop": lambda *_: None},
        ("draws in a loop over samples",),
    ),
    Fault(
        "what a replica without samples gives counts",
        {"has samples": lambda original: None},
        ("rows of one sample, joined",),
    ),
    Fault(
        "the samples that do not divide are left out",
        {"move a batch": _of_batch(lambda x: x[: len(x) // 2 * 2])},
        ("optimizer SGD",),
    ),
    Fault(
        "a sample takes the place of another",
        {"move a batch": _of_batch(lambda x: tf.concat([x[:-1], x[:1]], 0))},
        ("optimizer SGD",),
    ),
]

# What a comparison says, rather than a crash.
TOLD = (
    "Not equal|Arrays are not equal|differs between replica|^assert |"
    "depends on other samples|a sum or a mean over samples"
    "|takes a seed from a `SeedGenerator` by itself"
    "|by methods of its `value`|counts it once for each"
)
RED = AssertionError, kc.ReplicaMismatchError, kc.ConfluxWarning


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:.*any number of samples")
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(
            fault,
            name,
            id=f"{fault.name}-{name}",
            marks=[] if name == fault.red[0] else pytest.mark.long,
        )
        for fault in FAULTS
        for name in fault.red
    ],
)
def test_a_fault_turns_a_test_red(fault, name, monkeypatch):
    assert_passes(name)
    for place, replacement in fault.planted.items():
        owner, attribute = find(place)
        original = getattr(owner, attribute)
        if replacement is AS_KERAS_HAS_IT:
            planted = inspect.unwrap(original)
        else:
            planted = _with_original(original, replacement)
        monkeypatch.setattr(owner, attribute, planted)
    with pytest.raises(RED, match=TOLD):
        run(name)


def _with_original(original: Callable, replacement: Callable) -> Callable:
    @functools.wraps(original)
    def planted(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    return planted


def test_each_place_is_patched():
    used = {place for fault in FAULTS for place in fault.planted}
    helpers = {"compiles", "compiles a shape", "copies", "collectives"}
    assert used | helpers == set(PLACES)
    for place in PLACES:
        owner, name = find(place)
        assert hasattr(owner, name), place
