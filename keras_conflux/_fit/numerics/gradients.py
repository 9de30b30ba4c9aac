"""Makes each replica's gradients those of the global batch."""

import functools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import keras_internals
from keras_conflux._compat import keras_variables
from keras_conflux._custom_loops import spmd
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics import branches
from keras_conflux._fit.numerics import layer_state
from keras_conflux._fit.numerics import single_update
from keras_conflux._fit.numerics import sparse_gradients
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication import promotion
from keras_conflux._replication import state
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import is_replicated
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import whole_batch_strategy

_outside_functions: Any = weakref.WeakKeyDictionary()


def apply(
    original: Callable,
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Reduces, and then applies as a single device would.

    Everything an optimizer does with gradients (clipping, accumulation, loss
    scaling, decay, averaging) then acts on the gradient of the global batch,
    on every replica alike. Where the gradients come from decides:

    * a step of `fit`: what a tape returns is the gradient of the global batch
      already;
    * `withdevices`: nothing; the user has called `allreduce`;
    * a bare `strategy.run`: the sum, as Keras documents it.
    """
    if not in_replica():
        return _outside(original, optimizer, grads, trainable_variables)
    context = step_context.current()
    if context is not None and context.optimizing:
        return original(optimizer, grads, trainable_variables)
    given = None if trainable_variables is None else list(trainable_variables)
    _check_replicated(optimizer, given)
    _build(optimizer, given)
    grads = list(grads)
    accumulating = False
    _refuse_overwriting(optimizer, given, context)
    if context is None:
        grads = _shaped(_repeatable(grads), given)
        grads = replica_collectives().all_reduce("sum", grads)
    elif context.batch_fraction is not None:
        accumulating = _accumulates(optimizer)
        branches.note_update(optimizer, context)
        layer_state.settle(given or [], context)
        grads = _of_fit(_repeatable(grads), given, context, accumulating)
    else:
        grads = _repeatable(grads)
        _warn_if_local(context, grads)
    with step_context.optimizing(accumulating):
        return original(optimizer, grads, given)


def _refuse_overwriting(
    optimizer: Any, trained: list[Any] | None, context: StepContext | None
) -> None:
    """Raises where values that Keras takes for gradients would be summed."""
    overwritten = [*filter(_is_overwritten, trained or [])]
    if not overwritten or replica_collectives().count == 1:
        return
    in_fit = context is not None and context.batch_fraction is not None
    if in_fit and not _accumulates(optimizer):
        return
    steps = "`gradient_accumulation_steps`" if in_fit else "a loop of your own"
    raise NotImplementedError(
        f"{state.name_of(overwritten[0])} gets its gradient as its value, as "
        f"layers in float8 do, which several replicas do in `fit` only, and "
        f"without accumulation. Received: {steps}. Train by `fit` without "
        "`gradient_accumulation_steps`, or on one device."
    )


def _build(optimizer: Any, trained: list[Any] | None) -> None:
    """Makes an optimizer's variables outside of all graphs that are traced.

    XLA programs cannot make any, and TensorFlow traces a function twice that
    has made some. Another thread traces nothing.
    """
    if trained and not optimizer.built and not tf.executing_eagerly():
        strategy = tf.distribute.get_strategy()

        def build() -> None:
            with strategy.scope():
                optimizer.build(trained)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(keras_internals.with_this_threads_state(build)).result()


def _check_replicated(optimizer: Any, trained: list[Any] | None) -> None:
    """Raises unless each replica has its own copy of what it will write.

    Replicas would write one variable after another, or wait for each other.
    """
    for what, found in (
        (f"of the optimizer {optimizer.name!r}", optimizer.variables),
        ("which the optimizer is to update", trained or []),
    ):
        for variable in found:
            is_keras = isinstance(variable, keras.Variable)
            if is_keras and not is_replicated(
                keras_variables.backing(variable)
            ):
                raise StrategyError(
                    f"{state.name_of(variable)}, {what}, has a single "
                    "copy, but the step runs on several devices. Give the "
                    "model and the optimizer to `keras_conflux.replicate` "
                    "before the step."
                )


def _repeatable(grads: list[Any]) -> list[Any]:
    """Makes sparse gradients dense on GPUs, before they are reduced.

    There, rows that occur twice are added up in any order, so that applying
    the same sparse gradient would give each replica other roundings.
    """
    if not replica_collectives().on_gpu:
        return grads
    return [
        tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g
        for g in grads
    ]


def _shaped(grads: list[Any], trained: list[Any] | None) -> list[Any]:
    """Tells TensorFlow that gradients have the shapes of their variables.

    It often cannot know where the number of samples is open. Then buckets
    would be of unknown sizes, and these be compared in each step.
    """
    if trained is None or len(trained) != len(grads):
        return grads
    return [
        tf.ensure_shape(g, v.shape)
        if tf.is_tensor(g) and not g.shape.is_fully_defined()
        else g
        for g, v in zip(grads, trained, strict=True)
    ]


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
    if _is_accumulating():
        finite = (
            replica_collectives().all_reduce("min", tf.cast(finite, tf.int32))
            > 0
        )
    return finite


def _is_accumulating() -> bool:
    context = step_context.current()
    return context is not None and context.accumulating


def reduced(
    grads: list[Any], sources: list[Any], context: StepContext
) -> list[Any]:
    """Sums the gradients of all replicas, which have their weights already."""
    grads = _shaped(_repeatable(grads), sources)
    is_value = [_is_overwritten(source) for source in sources]
    own = [i for i, value in enumerate(is_value) if not value]
    sums = iter(
        sparse_gradients.summed(
            [grads[i] for i in own],
            [sources[i] for i in own],
            functools.partial(_summed, context=context),
            context,
        )
    )
    values = [grads[i] for i, value in enumerate(is_value) if value]
    maxima = iter(_maxima(values, context))
    grads = [next(maxima if value else sums) for value in is_value]
    context.kinds.mark_equal(grads)
    return grads


def _summed(grads: list[Any], context: StepContext) -> list[Any]:
    collectives = replica_collectives()
    if context.may_be_empty:
        return collectives.weighted_sum(grads, _has_samples(context))
    return collectives.all_reduce("sum", grads)


def _maxima(values: list[Any], context: StepContext) -> list[Any]:
    """Returns the largest of what Keras puts in place of variables.

    These are scales of layers in float8, which follow from the values before
    and are equal, and histories of largest magnitudes.
    """
    if not values:
        return []
    collectives = replica_collectives()
    if context.may_be_empty:
        values = collectives.weighted(values, _has_samples(context))
    return collectives.all_reduce("max", values)


def _is_overwritten(variable: Any) -> bool:
    """Whether Keras puts the gradient of a variable in place of its value."""
    return getattr(variable, "overwrite_with_gradient", False)


def _has_samples(context: StepContext) -> tf.Tensor:
    """A weight that ignores what a stand-in for samples has computed."""
    return tf.where(context.batch_fraction > 0, 1.0, 0.0)


def scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Notes losses whose gradients Keras hands from the tape to `apply`.

    If the optimizer accumulates gradients, they are reduced when it updates,
    and not in each step.
    """
    result = original(optimizer, loss)
    context = step_context.current_fit_step()
    if context is None or not context.in_keras_step:
        return result
    if _accumulates(optimizer):
        context.losses_to_accumulate.append(result)
    return result


def train_step(original: Callable, model: keras.Model, data: Any) -> Any:
    """Tells that Keras' own `train_step` is running, and not the user's."""
    context = step_context.current_fit_step()
    if context is None:
        return original(model, data)
    context.in_keras_step = True
    try:
        return original(model, data)
    finally:
        context.in_keras_step = False


def _of_fit(
    grads: list[Any],
    trained: list[Any] | None,
    context: StepContext,
    accumulating: bool,
) -> list[Any]:
    """Returns the gradients of the global batch, or a replica's part of them.

    What a tape returned, and what was computed from that, is global already.
    Anything else, such as gradients that were computed by hand, is reduced
    here.
    """
    collectives = replica_collectives()
    if accumulating and _all_in(grads, context.local_gradients):
        grads = _shaped(grads, trained)
        return collectives.weighted(grads, _has_samples(context))
    if not _are_global(grads, context):
        grads = _made_global(_shaped(grads, trained), trained, context)
    if accumulating:  # the copies of accumulators are added up
        return collectives.weighted(grads, context.batch_fraction)
    return grads


def _are_global(grads: list[Any], context: StepContext) -> bool:
    return all(g is None or context.kinds.of(g) == EQUAL for g in grads)


def _all_in(grads: list[Any], known: list[Any]) -> bool:
    ids = {id(each) for each in known}
    return all(g is None or id(g) in ids for g in grads)


def _made_global(
    grads: list[Any], trained: list[Any] | None, context: StepContext
) -> list[Any]:
    given = [g for g in grads if g is not None]
    sparse = any(isinstance(g, tf.IndexedSlices) for g in given)
    if not sparse:
        try:
            values = iter(global_values(given, context))
            return [None if g is None else next(values) for g in grads]
        except CannotTell:
            pass

    def reduce(leaves: list[Any]) -> list[Any]:
        fraction = context.batch_fraction
        return replica_collectives().weighted_sum(leaves, fraction)

    sources = trained or [None] * len(grads)
    return sparse_gradients.summed(grads, sources, reduce, context)


def _accumulates(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(inner.gradient_accumulation_steps)


def _outside(
    original: Callable,
    optimizer: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    """Applies gradients on every replica, where they are given once for all."""
    given = None if trainable_variables is None else list(trainable_variables)
    if whole_batch_strategy() is not None:
        return single_update.apply(original, optimizer, grads, given)
    if tf.distribute.has_strategy():
        is_replicated_here = state.replicated_by(optimizer.variables[:1])
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if is_replicated_here and scales:
            return _in_replicas(original, optimizer, list(grads), given)
        return original(optimizer, grads, given)
    strategy = promotion.promote_beside(optimizer, given or [])
    if strategy is None:
        return original(optimizer, grads, given)
    with strategy.scope():
        _build(optimizer, given)
    # One function, for a loop that calls this again and again.
    functions = _outside_functions.setdefault(optimizer, {})
    key = strategy, tuple(map(id, given or ()))
    if key not in functions:
        weakly = weakref.ref(optimizer)  # which `functions` lives as long as

        def everywhere(grads: list[Any]) -> None:
            with step_context.optimizing():
                original(weakly(), grads, given)

        functions[key] = spmd.withdevices(
            tf.autograph.experimental.do_not_convert(everywhere),
            devices=strategy.devices,
        )
    functions[key](list(grads))
    return None


def _in_replicas(
    original: Callable, optimizer: Any, grads: list[Any], given: Any
) -> None:
    """Applies in each replica what Keras would refuse to apply in a scope."""
    if given and not optimizer.built:  # each replica would build it
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(given)

    def everywhere(grads: list[Any]) -> None:
        with step_context.optimizing():
            original(optimizer, grads, given)

    tf.distribute.get_strategy().run(
        tf.autograph.experimental.do_not_convert(everywhere), args=(grads,)
    )


def skip_second_reduction(
    original: Callable, optimizer: Any, grads_and_vars: Any
) -> list:
    """Leaves gradients alone that `apply` has reduced."""
    if in_replica():
        return list(grads_and_vars)
    return original(optimizer, grads_and_vars)


def _warn_if_local(context: StepContext, grads: list[Any]) -> None:
    if "local gradients" in context.warned:
        return
    if tf.executing_eagerly():  # nothing tells where a tensor comes from
        return
    reduced = [op for leaf in context.reduced for op in _ops(leaf)]
    if depends_on([op for leaf in grads for op in _ops(leaf)], reduced):
        return
    context.warn_once(
        "local gradients",
        "an optimizer applies gradients that no `allreduce` has touched, so "
        "the replicas are about to drift apart. Call "
        "`gradients = keras_conflux.allreduce('mean', gradients)` before it.",
    )


def _ops(leaf: Any) -> list[tf.Operation]:
    if isinstance(leaf, tf.IndexedSlices):
        return [leaf.values.op]
    return [leaf.op] if tf.is_tensor(leaf) else []
