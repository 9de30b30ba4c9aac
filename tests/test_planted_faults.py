"""Each mechanism, switched off, makes tests fail that pass with it.

The comparison with one device is worth as much as it notices. Here each
mechanism in turn is replaced by a fault, and the tests that are named beside
the fault must fail, by an assertion and not by a crash.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_batches
import test_collectives
import test_equal
import test_fit
import test_layer_state
import test_withdevices
from cases import CASES
from conftest import MANY
from conftest import ON_GPU
from models import Keeps
from models import assert_same_outcome
from models import regression

import keras_conflux as kc
from keras_conflux._compat.private_keras_names import Patched

pytestmark = [
    pytest.mark.skipif(MANY < 2, reason="needs two devices"),
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
    "accumulates": f"{NUMERICS}.gradients:_accumulates",
    "accumulators": "keras_conflux._compat.keras_internals:accumulators",
    "average": f"{NUMERICS}.layer_state:_average",
    "compiles": f"{FIT}.input.execution_plan:compiles",
    "compiles a shape": (
        f"{FIT}.execution.step_executor:StepExecutor._is_worth_compiling"
    ),
    "copies": f"{REPLICATION}.state:copies",
    "logs": f"{NUMERICS}.logs:of_global_batch",
    "move a batch": f"{FIT}.input.batch_sharder:BatchSharder._one",
    "promote": f"{REPLICATION}.promotion:_promote_variable",
    "reduce": f"{COLLECTIVES}._reduce",
    "reduce a tree": f"{COLLECTIVES}.all_reduce",
    "reduce gradients": f"{NUMERICS}.gradients:_weighted",
    "reduce sparse": f"{COLLECTIVES}._sparse_sum",
    "collectives": f"{REPLICATION}.strategy:replica_collectives",
    "restore metrics": f"{NUMERICS}.logs:restore",
    "scale back": f"{NUMERICS}.sync_batch_norm:_gradient_scaled",
    "send": f"{COLLECTIVES}.broadcast",
    "fractions": f"{FIT}.execution.graph_program:batch_fractions",
    "synchronize": f"{REPLICATION}.synchronization:synchronize",
    "weigh": "keras_conflux._communication.dtypes:weighted",
    "without stand-ins": f"{FIT}.execution.replica_step:_if_any",
    # of Keras, replaced by the package
    "add": Patched.ASSIGN_ADD.path,
    "assign": Patched.ASSIGN.path,
    "clip": Patched.CLIP_GRADIENTS.path,
    "divide loss": Patched.SCALE_LOSS.path,
    "mask": Patched.APPLY_MASK.path,
    "moments": Patched.SYNCHRONIZED_MOMENTS.path,
    "reduce in Keras": Patched.SUM_GRADIENTS.path,
    "reduce losses": Patched.REDUCE_VALUES.path,
    "scale loss": Patched.OPTIMIZER_SCALE_LOSS.path,
    "seed": Patched.NEXT_SEED.path,
    "show loss": Patched.UNSCALE_LOSS.path,
    "update mean": Patched.MEAN_UPDATE.path,
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


# Tests beside the cases of `test_equal.py`.
TESTS = {
    "copies after XLA": assert_equal_after_xla,
    "random numbers": test_fit.test_dropout_differs_between_replicas,
    "sums of a layer": functools.partial(
        test_layer_state.test_what_a_layer_keeps, test_layer_state._sums, False
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
    "rows of a prediction": functools.partial(
        test_batches.test_predict_of_any_number_of_rows, tf.identity, 1
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


def _local_gradients(original, optimizer, grads, *_, **__):
    return grads


def _sum_of_gradients(original, optimizer, grads, *_, **__):
    return call("collectives").all_reduce("sum", grads)


def _clip_first(original, optimizer, grads, *args, **kwargs):
    clip = find("clip")[1]
    grads = getattr(optimizer, clip)(grads)
    return original(optimizer, grads, *args, **kwargs)


def _finite_somewhere(original, self, op, *args):
    return original(self, "max" if op == "min" else op, *args)


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


def _of_batch(change):
    def move(original, self, batch, spec):
        changed = [None if x is None else change(x) for x in batch]
        return original(self, type(batch)(changed), spec)

    return move


def _local_gradient(original, self, op, x):
    # The value of the reduction, and the gradient of doing nothing.
    return x + tf.stop_gradient(original(self, op, x) - x)


FAULTS = [
    # Gradients.
    Fault(
        "gradients are not reduced",
        {"reduce gradients": _local_gradients},
        ("optimizer SGD", "own train_step"),
    ),
    Fault(
        "gradients are added up, not averaged",
        {
            "scale loss": AS_KERAS_HAS_IT,
            "reduce gradients": _sum_of_gradients,
        },
        ("optimizer SGD", "optimizer Adadelta"),
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
        "gradients are clipped before they are reduced",
        {"reduce gradients": _clip_first},
        ("clipnorm", "global_clipnorm"),
    ),
    Fault(
        "sparse gradients are not gathered",
        {"reduce sparse": lambda original, self, leaf, *_: leaf},
        ("embedding with sparse gradients and clipping",),
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
        ("ignored classes",),
    ),
    Fault(
        "each replica divides by its own sample weights",
        {"reduce losses": AS_KERAS_HAS_IT},
        ("loss mean_with_sample_weight", "loss sum"),
    ),
    # Layers.
    Fault(
        "the loss gets its weight after it is differentiated",
        {
            "scale loss": AS_KERAS_HAS_IT,
            "scale back": lambda original, x, *_: x,
        },
        ("convolution and synchronized statistics",),
    ),
    Fault(
        "what flows to other replicas has no weight in a step of one's own",
        {"scale back": lambda original, x, *_: x},
        ("synchronized normalization in a step of one's own",),
    ),
    Fault(
        "synchronized moments are those of a replica",
        {"moments": _local_moments},
        ("convolution and synchronized statistics",),
    ),
    Fault(
        "moving averages are not averaged over the replicas",
        {"average": lambda *_: None},
        ("moving average of a layer",),
    ),
    Fault(
        "moving averages are averaged without weights",
        {
            "average": lambda original, weights, fraction: original(
                weights, _equal_weight()
            )
        },
        ("moving average of a layer",),
    ),
    Fault(
        "what layers write is not noticed",
        {"assign": AS_KERAS_HAS_IT},
        ("moving average of a layer",),
    ),
    Fault(
        "what layers add up is not noticed",
        {"add": AS_KERAS_HAS_IT},
        ("sums of a layer",),
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
        {"logs": lambda original, model, logs, *_: logs[0]},
        ("optimizer SGD", "own train_step"),
    ),
    Fault(
        "a mean in a metric counts a replica, not its samples",
        {"update mean": AS_KERAS_HAS_IT},
        ("own train_step",),
    ),
    Fault(
        "metrics count what a replica without samples ran on",
        {"restore metrics": lambda *_: None},
        ("last batch of one sample",),
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
        "a broadcast sends what another replica has",
        {"send": lambda original, self, tree, root: original(self, tree, 1)},
        ("broadcast",),
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
TOLD = "Not equal|Arrays are not equal|differs between replica|^assert "


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(fault, name, id=f"{fault.name}-{name}")
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
            planted = original.__wrapped__
        else:
            planted = _with_original(original, replacement)
        monkeypatch.setattr(owner, attribute, planted)
    with pytest.raises((AssertionError, kc.ReplicaMismatchError), match=TOLD):
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
