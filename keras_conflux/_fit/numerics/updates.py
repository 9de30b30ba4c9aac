"""The updates of optimizers: their use of gradients, and their writes."""

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common.contexts import having
from keras_conflux._common.errors import StrategyError
from keras_conflux._common.notices import tell
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._compat.replicated_variables import assert_of_running
from keras_conflux._fit.numerics import given_tensors
from keras_conflux._fit.numerics import gradients
from keras_conflux._fit.numerics.choices import Choices
from keras_conflux._fit.numerics.gradients import Gradients
from keras_conflux._fit.numerics.sparse_gradients import each_once
from keras_conflux._replication import model_options
from keras_conflux._replication import promotion
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.across_processes import run_everywhere
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.replica_context import whole_batch_strategy
from keras_conflux._replication.steps import Step
from keras_conflux._replication.strategy import is_replicated

_outside_functions: Any = weakref.WeakKeyDictionary()


def apply(
    original: Callable,
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Reduces, and then applies as a single device would.

    Where the gradients come from decides:

    * a step of `fit`: a tape returns the gradient of the global batch already;
    * `withdevices`: nothing; the user has called `allreduce`;
    * a bare `strategy.run`: the sum, as Keras documents it.
    """
    given = None if trainable_variables is None else list(trainable_variables)
    if not in_replica():
        return _outside(original, optimizer, grads, given)
    step = steps.current()
    if step is not None and step.is_updating:
        return _inside(original, optimizer, list(grads), given, step)
    if not tf.executing_eagerly() and _make_variables(optimizer, given):
        _note_build(optimizer, step)
    _check_replicated(optimizer, given)
    _refuse_overwriting(optimizer, given, step)
    grads = gradients.repeatable(list(grads))
    trained = keras_optimizers.trained_by(optimizer) if given is None else given
    if step is not None and step.batch_fraction is not None:
        accumulating = _accumulates(optimizer)
        Choices.of(step).note(f"applies the optimizer {optimizer.name!r}")
        grads = Gradients.of(step).to_apply(grads, trained, accumulating)
        with _applying(accumulating):
            return original(optimizer, grads, given)
    if step is None:
        grads = gradients.shaped(grads, trained)
        grads = replica_collectives().all_reduce("sum", grads)
    else:
        Gradients.of(step).warn_if_local(grads, trained)
        model_options.warn_in_loop(step, trained)
    return _apply_equal(original, optimizer, grads, given)


def _apply_equal(
    original: Callable,
    optimizer: Any,
    grads: list[Any],
    trained: list[Any] | None,
) -> Any:
    """Applies gradients that all replicas have, in a replica.

    Copies of accumulators are added up, also when the optimizer updates.
    """
    accumulating = _sums_copies(optimizer)
    with _applying(accumulating) as known:
        if accumulating:
            known_to = trained or keras_optimizers.trained_by(optimizer)
            grads = known.as_summands(grads, known_to)
        return original(optimizer, grads, trained)


def _inside(
    original: Callable,
    optimizer: Any,
    grads: list[Any],
    trained: list[Any] | None,
    step: Step,
) -> Any:
    """Applies gradients that an optimizer hands on to one that it holds."""
    known = Gradients.of(step)
    if known.are_accumulated or not _sums_copies(optimizer):
        return original(optimizer, grads, trained)
    # The outer one, such as `MultiOptimizer`, has got the batch's gradients.
    _refuse_overwriting(optimizer, trained, step)
    return _apply_equal(original, optimizer, grads, trained)


@contextlib.contextmanager
def _applying(accumulates: bool) -> Iterator[Gradients]:
    """Marks an optimizer's application of gradients in this replica.

    The `apply` of one that it holds, as a loss scale's, reduces nothing again.
    """
    step = steps.current() or Step("strategy.run")
    known = Gradients.of(step)
    with (
        steps.entered(step),
        step.after_turns(),
        having(step, is_updating=True),
        having(known, are_accumulated=accumulates),
    ):
        yield known


def _refuse_overwriting(
    optimizer: Any, trained: list[Any] | None, step: Step | None
) -> None:
    """Raises where values that Keras takes for gradients would be summed."""
    overwritten = [*filter(gradients.is_overwritten, trained or [])]
    if not overwritten or replica_collectives().count == 1:
        return
    in_fit = step is not None and step.batch_fraction is not None
    if in_fit and not _accumulates(optimizer):
        return
    steps = "`gradient_accumulation_steps`" if in_fit else "a loop of your own"
    raise NotImplementedError(
        f"{state.name_of(overwritten[0])} gets its gradient as its value, as "
        f"layers in float8 do, which several replicas do in `fit` only, and "
        f"without accumulation. Received: {steps}. Train by `fit` without "
        "`gradient_accumulation_steps`, or on one device."
    )


def _make_variables(optimizer: Any, trained: list[Any] | None) -> bool:
    """Makes an optimizer's variables outside of all graphs that are traced.

    XLA programs cannot make any. Another thread traces nothing. Variables that
    Keras has made since get their copies. Returns whether some are made.
    """
    strategy: Any = tf.distribute.get_strategy()
    is_new = bool(trained) and not optimizer.built
    before = len(optimizer.variables)

    def make() -> None:
        if is_new:
            with strategy.scope():
                optimizer.build(trained)
        promotion.promote(optimizer, strategy)

    weights = [x for x in trained or [] if isinstance(x, keras.Variable)]
    own = state.replicated_by(optimizer.variables[:1])
    is_ours = own is strategy and state.replicated_by(weights) in (None, own)
    if is_ours and (is_new or promotion.is_waiting(optimizer)):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(keras_variables.with_this_threads_state(make)).result()
    return len(optimizer.variables) > before


def _note_build(optimizer: Any, step: Step | None) -> None:
    """Has a step traced again, as TensorFlow does where it makes variables.

    Python code, as of `scale_loss`, may have asked whether it is built.
    """
    if step is not None:
        Gradients.of(step).have_built = True
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise StrategyError(
            f"The optimizer {optimizer.name!r} is built in `strategy.run`, "
            "after `scale_loss` may have used its initial scale as a "
            "constant. Write `optimizer.build(model.trainable_variables)` "
            "in the strategy's scope, before the step."
        )


def _check_replicated(optimizer: Any, trained: list[Any] | None) -> None:
    """Raises unless each replica has its own copy of all that it will write."""
    for what, found in (
        (f"of the optimizer {optimizer.name!r}", optimizer.variables),
        ("which the optimizer is to update", trained or []),
    ):
        for variable in found:
            if not isinstance(variable, keras.Variable):
                continue
            value = keras_variables.backing(variable)
            if is_replicated(value):
                assert_of_running(value, is_written=True)
            else:
                raise StrategyError(
                    f"{state.name_of(variable)}, {what}, has a single "
                    "copy that belongs to no replica. Give the model and the "
                    "optimizer to `keras_conflux.replicate` before the step, "
                    "and again after `enable_lora` has given it weights."
                )


def _accumulates(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(inner.gradient_accumulation_steps)


def _sums_copies(optimizer: Any) -> bool:
    """Whether the accumulated gradients are the sum of the copies.

    If Keras has made them in a scope, and no `fit` has trained, each has all.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return any(
        state.is_in_parts(each) or not state.is_mirrored(each)
        for each in keras_models.accumulators(inner)
    )


def scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Notes losses of which an optimizer accumulates the gradients.

    These are reduced when it updates, and not in each step.
    """
    result = original(optimizer, loss)
    step = steps.current_fit_step()
    if step is not None and _accumulates(optimizer):
        Gradients.of(step).postpone(optimizer, result)
    return result


def train_step(original: Callable, model: keras.Model, data: Any) -> Any:
    """Marks a run of Keras' own `train_step`, and not of the user's."""
    step = steps.current_fit_step()
    if step is None:
        return original(model, data)
    with having(Gradients.of(step), is_keras_step=True):
        return original(model, data)


def write(original: Callable, optimizer: Any, variable: Any, new: Any) -> None:
    """Writes a variable, or the tensor that an update is given for it."""
    if not given_tensors.write(original.__name__, variable, new):
        original(optimizer, variable, new)


def add(original: Callable, optimizer: Any, variable: Any, value: Any) -> None:
    """Adds or subtracts, after the rows that repeat are added up.

    So a sparse update leaves the same bits in the copies of all replicas:
    TensorFlow adds repeated rows to a variable in any order, as its threads
    come. Only the written values are added up here: earlier computations of
    Keras' optimizers with each row, such as squares, are as on one device.
    """
    # XLA has one replica here; several on GPUs have dense gradients.
    strategy = whole_batch_strategy()
    has_copies = in_replica() and replica_collectives().count > 1
    if strategy is not None:
        has_copies = strategy.communicator.size > 1
    if isinstance(value, tf.IndexedSlices) and has_copies:
        value = each_once(value)
    write(original, optimizer, variable, value)


def reduce_accumulated(
    original: Callable, optimizer: Any, grads: list[Any]
) -> list[Any]:
    """Reduces gradients that were accumulated, before they are clipped.

    So there is one reduction per update, not one per micro-step. Until then
    each replica's accumulators hold the part of its own samples.
    """
    if _is_accumulating():
        grads = replica_collectives().all_reduce("sum", grads)
    return original(optimizer, grads)


def check_finite(original: Callable, optimizer: Any, grads: Any) -> Any:
    """Whether the gradients of all replicas are finite."""
    finite = original(optimizer, grads)
    return gradients.hold_everywhere(finite) if _is_accumulating() else finite


def _is_accumulating() -> bool:
    step = steps.current()
    return step is not None and Gradients.of(step).are_accumulated


def skip_second_reduction(
    original: Callable, optimizer: Any, grads_and_vars: Any
) -> list:
    """Leaves gradients alone that `apply` has reduced."""
    if in_replica():
        return list(grads_and_vars)
    return original(optimizer, grads_and_vars)


def _outside(
    original: Callable, optimizer: Any, grads: Any, given: list[Any] | None
) -> Any:
    """Applies gradients on every replica, where they are given once for all."""
    if whole_batch_strategy() is not None:
        return _apply_once(original, optimizer, grads, given)
    if tf.distribute.has_strategy():
        is_replicated_here = state.replicated_by(optimizer.variables[:1])
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if is_replicated_here and (scales or _sums_copies(optimizer)):
            return _in_replicas(original, optimizer, list(grads), given)
        return original(optimizer, grads, given)
    strategy = promotion.promote_beside(optimizer, given or [])
    if strategy is None:
        if process_count() > 1 and optimizer not in _outside_functions:
            for each in state.stateful_objects(optimizer, keras.Optimizer):
                _outside_functions[each] = {}  # they call this, too
            warn(
                f"{optimizer.name}: each process trains a model of its own. "
                "For one that all train, call `keras_conflux.replicate(model)`."
            )
        return original(optimizer, grads, given)
    # One function, for a loop that calls this again and again.
    functions = _outside_functions.setdefault(optimizer, {})
    key = strategy, tuple(map(id, given or ()))
    if key not in functions:
        if strategy.communicator.size > 1:
            say = warn if process_count() > 1 else tell
            say(
                f"{optimizer.name}: in a loop outside of steps one device "
                "computes the gradients, which all processes need of the same "
                "data. To use all devices, decorate the loop's step with "
                "`keras_conflux.withdevices`."
            )
        with strategy.scope():
            _make_variables(optimizer, given)
        weakly = weakref.ref(optimizer)  # which `functions` lives as long as

        def everywhere(grads: list[Any]) -> None:
            _apply_equal(original, weakly(), grads, given)

        functions[key] = run_everywhere(everywhere, strategy)
    functions[key](list(grads))
    return None


def _in_replicas(
    original: Callable, optimizer: Any, grads: list[Any], given: Any
) -> None:
    """Applies in each replica gradients that Keras would refuse in a scope."""
    _build(optimizer, given)  # which each replica would do

    @tf.autograph.experimental.do_not_convert
    def everywhere(grads: list[Any]) -> None:
        _apply_equal(original, optimizer, grads, given)

    tf.distribute.get_strategy().run(everywhere, args=(grads,))


def _apply_once(
    original: Callable, optimizer: Any, grads: Any, trained: list[Any] | None
) -> Any:
    """Applies the gradients of the whole batch as one device does."""
    _build(optimizer, trained)
    if process_count() > 1 and keras_models.accumulators(optimizer):
        # A process may not have all that has been accumulated.
        raise NotImplementedError(
            f"{optimizer.name}: with `run_eagerly=True` over several processes "
            "no gradients are accumulated, as each process has a part of "
            "them. Received: `gradient_accumulation_steps`. Run it in one "
            "process, or leave out one of both."
        )
    strategy = keras_models.optimizer_strategy(optimizer)
    keras_models.set_optimizer_strategy(optimizer, _ONE_DEVICE)
    try:
        return original(optimizer, grads, trained)
    finally:
        keras_models.set_optimizer_strategy(optimizer, strategy)


def _build(optimizer: Any, trained: list[Any] | None) -> None:
    if trained and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(trained)


def _update(
    variable: Any,
    function: Callable,
    args: tuple = (),
    kwargs: dict | None = None,
    group: bool = True,
) -> Any:
    """Returns the result of a function that updates a variable.

    Of one whose copies add up to its value, the first copy gets all of it.
    """
    del group  # of one call there is nothing to group
    if state.is_sum(variable):
        variable.assign(variable.read_value())
        variable = state.copies(variable)[0]
    return function(variable, *args, **(kwargs or {}))


_ONE_DEVICE = SimpleNamespace(extended=SimpleNamespace(update=_update))
"""Stands for the strategy of an optimizer."""
