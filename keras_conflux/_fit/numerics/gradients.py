"""Makes each replica's gradients those of the global batch."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.errors import StrategyError
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_internals
from keras_conflux._custom_loops import spmd
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication import state
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import in_replica
from keras_conflux._replication.strategy import is_replicated
from keras_conflux._replication.strategy import replica_collectives

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

    * a step of `fit`: the mean, weighted by each replica's batch fraction;
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
    trainable_variables = given
    grads = _repeatable(list(grads))
    if given is not None and len(given) == len(grads):
        grads = _of_known_shape(grads, given)
    accumulating = False
    if context is None:
        grads = replica_collectives().all_reduce("sum", grads)
    elif context.batch_fraction is not None:
        accumulating = _accumulates(optimizer)
        grads = _weighted(optimizer, grads, context, reduce=not accumulating)
    else:
        _warn_if_local(context, grads)
    with step_context.optimizing(accumulating):
        return original(optimizer, grads, trainable_variables)


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
                keras_internals.backing(variable)
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


def _of_known_shape(grads: list[Any], trained: list[Any]) -> list[Any]:
    """Tells TensorFlow that gradients have the shapes of their variables.

    It often cannot know where the number of samples is open. Then buckets
    would be of unknown sizes, and these be compared in each step.
    """
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


def scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Weights a replica's loss by its batch fraction, before the gradient.

    So what flows backward through a collective, as in a synchronized
    BatchNormalization, already has the weight that it has on one device. A
    `train_step` that does not call `scale_loss` has its gradients weighted
    when they are applied.
    """
    context = step_context.current_fit_step()
    if context is not None:
        loss = loss * tf.cast(context.batch_fraction, loss.dtype)
        context.scaled.add(id(optimizer))
    return original(optimizer, loss)


def _weighted(
    optimizer: Any, grads: list, context: StepContext, reduce: bool
) -> list:
    """Returns this replica's part of the global gradients, or their sum."""
    weight = context.batch_fraction
    if id(optimizer) in context.scaled:
        weight = tf.where(weight > 0, 1.0, 0.0)
    if reduce:
        return replica_collectives().weighted_sum(grads, weight)
    return replica_collectives().weighted(grads, weight)


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
    strategy = state.replicated_by(optimizer.variables[:1])
    if strategy is None or tf.distribute.has_strategy():
        return original(optimizer, grads, trainable_variables)
    given = None if trainable_variables is None else list(trainable_variables)
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


def skip_second_reduction(
    original: Callable, optimizer: Any, grads_and_vars: Any
) -> list:
    """Leaves gradients alone that `apply` has reduced."""
    if in_replica():
        return list(grads_and_vars)
    return original(optimizer, grads_and_vars)


def _warn_if_local(context: StepContext, grads: list[Any]) -> None:
    if "local gradients" in context.warned or replica_collectives().count == 1:
        return
    if tf.executing_eagerly():  # nothing tells where a tensor comes from
        return
    reduced = [op for leaf in context.reduced for op in _ops(leaf)]
    if depends_on([op for leaf in grads for op in _ops(leaf)], reduced):
        return
    context.warned.add("local gradients")
    warn(
        f"{context.name}: an optimizer applies gradients that no `allreduce` "
        "has touched, so the replicas are about to drift apart. Call "
        "`gradients = keras_conflux.allreduce('mean', gradients)` before it."
    )


def _ops(leaf: Any) -> list[tf.Operation]:
    if isinstance(leaf, tf.IndexedSlices):
        return [leaf.values.op]
    return [leaf.op] if tf.is_tensor(leaf) else []
