"""Makes gradient tapes return the global gradient in a step of `fit`.

Each replica differentiates with the weight that makes the sum over replicas the
gradient that one device computes; then gradients of variables are summed.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import DERIVED
from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import MEAN
from keras_conflux._batch_analysis import OPAQUE
from keras_conflux._batch_analysis import TOTAL
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import derivation_of
from keras_conflux._batch_analysis import kind_by_trial
from keras_conflux._common.contexts import having
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics.choices import GRADIENT
from keras_conflux._fit.numerics.choices import Choices
from keras_conflux._fit.numerics.global_values import OwnRows
from keras_conflux._fit.numerics.global_values import own_slope
from keras_conflux._fit.numerics.global_values import recomputed
from keras_conflux._fit.numerics.global_values import reduced_by_role
from keras_conflux._fit.numerics.global_values import slopes_of
from keras_conflux._fit.numerics.gradients import Gradients
from keras_conflux._fit.numerics.layers import Layers
from keras_conflux._fit.numerics.warnings import UnclearLosses
from keras_conflux._graphs import walks
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step

_Seeded = list[tuple[Any, Any]]
_Context = Callable[
    [Step, list[Any], list[Any]], contextlib.AbstractContextManager[Any]
]
_contexts: list[_Context] = []
differentiate_in = _contexts.append
"""Has a context be entered while the backward pass of a step is traced.

It takes the step, the sources, and a list, for the derivatives at its end.
"""


def gradient(
    original: Callable,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Returns the gradient of the global batch in a step of `fit`.

    Gradients of tensors of a replica's own samples are not summed: they are the
    part of one device's gradient that belongs to these samples.
    """
    step, others = _computing(), (output_gradients, unconnected_gradients)
    if step is None:
        return original(tape, target, sources, *others)
    targets = tf.nest.flatten(target)
    given = [None] * len(targets)
    if output_gradients is not None:
        given = tf.nest.flatten(output_gradients)
    flat = tf.nest.flatten(sources)
    every = [x for x in (*flat, *targets, *given) if x is not None]
    kind = step.kinds.of
    equal = (isinstance(x, tf.Tensor) and kind(x) == EQUAL for x in every)
    if all(equal):  # on all replicas, and so are its derivatives
        return left_alone(original, tape, target, sources, *others)
    if any(_is_shared(source, step) for source in flat):
        _refuse_in_loops(step)
        Choices.of(step).note(GRADIENT)
    past = [y for x in flat for y in _Passed.of(step).slopes.get(id(x), ())]
    for one in targets if past else ():
        if isinstance(one, tf.Tensor) and walks.depends_on([one.op], past):
            _warn_of_target(step, one)
    with having(Gradients.of(step), are_computed=True):
        seeded = [
            pair
            for one, seed in zip(targets, given, strict=True)
            for pair in _seeded(one, seed, flat, step)
        ]
        found: list[Any] = []
        with contextlib.ExitStack() as contexts:
            for each in _contexts:
                contexts.enter_context(each(step, flat, found))
            found += _by_rows(
                functools.partial(
                    original,
                    tape,
                    [one for one, _ in seeded],
                    output_gradients=_output_gradients(seeded),
                    unconnected_gradients=unconnected_gradients,
                ),
                flat,
                step,
            )
        found = _reduced(targets, found, flat, step)
    return tf.nest.pack_sequence_as(sources, found)


class _Passed(steps.Part):
    """The slopes that were computed past a tensor, which tapes do not see."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.slopes: dict[int, list[tf.Operation]] = {}
        """By the id of the tensor."""


def left_alone(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Computes with tapes that sum nothing, as TensorFlow does for tangents."""
    step = _computing()
    if step is None:
        return original(*args, **kwargs)
    with having(Gradients.of(step), are_computed=True):
        return original(*args, **kwargs)


def _by_rows(original: Callable, sources: list[Any], step: Step) -> list[Any]:
    """Differentiates also by the replacements of a source."""
    places = [OwnRows.of(step).of_tensor(source) for source in sources]
    found = original(sources=[*sources, *itertools.chain(*places)])
    of_sources, others = found[: len(sources)], iter(found[len(sources) :])
    return [
        functools.reduce(_sum, itertools.islice(others, len(own)), one)
        for one, own in zip(of_sources, places, strict=True)
    ]


def _sum(one: Any, other: Any) -> Any:
    return one if other is None else other if one is None else one + other


def _computing() -> Step | None:
    """Returns the step of `fit` in which a tape begins to differentiate."""
    step = steps.current_fit_step()
    if step is None or not in_replica():
        return None
    return None if Gradients.of(step).are_computed else step


def jacobian(
    original: Callable,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Leaves the derivatives of each entry unchanged, and marks their kinds.

    Derivatives of rows of samples are rows, and of a mean, a mean.
    """
    found = left_alone(original, tape, target, sources, *args, **kwargs)
    step = _computing()
    if step is None:
        return found
    kind = step.kinds.of(target)
    linear = kind.role in (Role.EQUAL, Role.ROWS, Role.TOTAL, Role.MEAN)
    if kind.depends_on_other_samples or not linear:
        kind = OPAQUE
    for one, source in zip(
        tf.nest.flatten(found), tf.nest.flatten(sources), strict=True
    ):
        if isinstance(one, tf.Tensor):
            step.kinds.mark(one, kind if _is_shared(source, step) else OPAQUE)
    return found


def batch_jacobian(
    original: Callable,
    tape: tf.GradientTape,
    target: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Leaves the derivatives of each sample's entries by its own unchanged.

    They are rows of samples.
    """
    found = left_alone(original, tape, target, *args, **kwargs)
    step = _computing()
    if step is not None and isinstance(found, tf.Tensor):
        step.kinds.mark(found, step.kinds.of(target))
    return found


def _seeded(target: Any, seed: Any, sources: list[Any], step: Step) -> _Seeded:
    """Returns tensors to differentiate in place of a target, with weights."""
    if isinstance(target, keras.Variable | tf.Variable):  # equal on all
        seed = tf.ones(target.shape, target.dtype) if seed is None else seed
        return [(target, seed * tf.cast(step.batch_fraction, seed.dtype))]
    is_tensor = isinstance(target, tf.Tensor)
    if not is_tensor or not walks.has_derivatives(target.dtype):
        return [(target, seed)]
    is_seeded = seed is not None
    loss = _weighted(target, seed) if is_seeded else target
    kind = kind_by_trial(loss, step.kinds)
    is_alone = replica_collectives().count == 1
    own = Layers.of(step).own_gradients
    mixed = set() if is_alone else own.depending_on_mixed(loss)
    if is_alone:
        pass  # the tape differentiates one device's loss, also twice
    elif kind.role is Role.DERIVED or kind.mixed or mixed:
        if is_seeded and tensorflow_tracing.is_recorded([seed]):
            _warn_of_target(step, target)  # derivatives by the seed are lost
        try:
            return _through_reductions(loss, sources, mixed, step)
        except NotDerivable:
            _warn_of_target(step, target)
    elif kind.role is Role.OPAQUE and is_seeded:
        _warn_of_target(step, target)
    elif kind.role is Role.OPAQUE:
        _warn_of_sum(step, target)
    if is_seeded and kind.role in (Role.DERIVED, Role.OPAQUE):
        kind = step.kinds.of(target)
    summed = (Role.ROWS, Role.TOTAL, Role.COUNT)
    if kind.role in summed and not kind.divided:
        return [(target, seed)]
    if kind.role in (Role.OPAQUE, Role.DERIVED) and target.shape.rank != 0:
        return [(target, seed)]
    if seed is None:
        seed = tf.ones_like(target)
    return [(target, seed * tf.cast(step.batch_fraction, seed.dtype))]


def _weighted(target: tf.Tensor, seed: Any) -> tf.Tensor:
    """Returns a sum whose derivative by a target is the seed."""
    weights = tf.stop_gradient(tf.cast(seed, target.dtype))
    return tf.reduce_sum(target * weights)


def _output_gradients(seeded: _Seeded) -> list[Any] | None:
    if all(seed is None for _, seed in seeded):
        return None
    return [tf.ones_like(one) if seed is None else seed for one, seed in seeded]


def _through_reductions(
    target: tf.Tensor, sources: list[Any], mixed: set[int], step: Step
) -> _Seeded:
    """Differentiates by the chain rule, through the replicas' reductions.

    The target is computed once more, from the reductions over all samples. Its
    derivatives by these are equal on all replicas, and each replica goes on
    with its contributions to them. Contributions that the tape cannot
    differentiate, such as counts of labels, need no derivatives. Gradients by
    the tensors of the ids `mixed` depend on the whole batch.
    """
    own = {id(x): OwnRows.of(step).of_tensor(x) for x in sources}
    made_of_all = [
        isinstance(x, tf.Tensor)
        and step.kinds.of(x).needs_all_samples
        and not own[id(x)]
        for x in sources
    ]
    if all(made_of_all):  # the derivatives are computed once more, as these are
        return [(target, None)]
    if any(made_of_all):
        raise NotDerivable(target.name)
    found = derivation_of(target, step.kinds, made=mixed)
    remade = {id(x) for each in found.operations for x in each.outputs}
    if any(own[key] for key in own.keys() & remade):
        raise NotDerivable(target.name)
    sources = [*sources, *itertools.chain(*own.values())]
    known = reduced_by_role(found.sources, step)
    everywhere = recomputed(found, known, step)
    entries = {k: x for k, x in found.sources.items() if x.dtype.is_floating}
    keys = [
        key
        for key, entry in entries.items()
        if walks.may_be_differentiated_by(entry, sources)
    ]
    slopes = slopes_of(
        [everywhere],
        [known[key] for key in keys],
        others=[known[key] for key in entries if key not in keys],
    )
    made = [x.op for x in slopes if x is not None]
    for key in remade:
        _Passed.of(step).slopes.setdefault(key, []).extend(made)
    seeded: _Seeded = []
    for key, slope in zip(keys, slopes, strict=True):
        source = entries[key]
        if slope is not None:
            seeded.append((source, own_slope(source, slope, step)))
    return seeded or [(target, tf.zeros_like(target))]


def _reduced(
    targets: list[Any], found: list[Any], sources: list[Any], step: Step
) -> list[Any]:
    """Sums the gradients of variables that all replicas share."""
    shared = []
    for i, (one, source) in enumerate(zip(found, sources, strict=True)):
        if one is not None and _is_shared(source, step):
            shared.append(i)
        elif isinstance(one, tf.Tensor):
            # It is this replica's part of one device's gradient.
            own = OwnRows.of(step).of_tensor(source)
            kind = step.kinds.of(own[-1] if own else source)
            if kind.divided:  # one device divides by another number
                kind = DERIVED
            step.kinds.mark(one, _DUAL.get(kind.role, kind))
    own, variables = ([x[i] for i in shared] for x in (found, sources))
    _refuse_tangents(own, step)
    total = Gradients.of(step).reduced(targets, own, variables)
    for i, each in zip(shared, total, strict=True):
        found[i] = each
    return found


_DUAL = {Role.MEAN: TOTAL, Role.TOTAL: MEAN}
"""The kinds of derivatives by reductions over samples."""


def _refuse_in_loops(step: Step) -> None:
    """Raises where gradients would have to be summed, and cannot be."""
    has_others = replica_collectives().count > 1
    if has_others and tensorflow_tracing.in_replica_loop():
        raise NotImplementedError(
            f"{step.name}: a GradientTape in a loop, such as that of "
            "`tf.while_loop`, `tf.map_fn` or `tf.vectorized_map`, "
            "differentiates by what all replicas share, and in a loop the "
            "replicas' gradients cannot be added up. If each turn has a loss "
            "of its own, as the tasks of meta-learning do, write "
            "`tf.gradients(loss, sources)` there, which is left as it is. "
            "Otherwise write the loop in Python, or around the step."
        )


def _refuse_tangents(found: list[Any], step: Step) -> None:
    """Raises where a tangent would have to pass a sum over replicas."""
    has_others = replica_collectives().count > 1
    if has_others and tensorflow_tracing.has_tangents(found):
        raise NotImplementedError(
            f"{step.name}: a `tf.autodiff.ForwardAccumulator` follows "
            "gradients that replicas add up. Write the GradientTape around the "
            "accumulator: the gradient of `accumulator.jvp(loss)` is the same "
            "product of the Hessian with the tangents."
        )


def _is_shared(source: Any, step: Step) -> bool:
    if not isinstance(source, tf.Tensor):
        return True
    return step.kinds.of(source) == EQUAL


def _warn_of_target(step: Step, target: tf.Tensor) -> None:
    UnclearLosses.of(step).add(target)
    step.warn_once(
        "target",
        f"the loss of shape {target.shape} that a GradientTape "
        "differentiates depends on samples in a way that replicas cannot "
        "reproduce for the whole batch, so each uses the samples of its own "
        "shard. Compare samples, or compute a ratio of sums, in the loss only, "
        "not in the model nor in a `tf.function` that reads a variable, whose "
        "value it may be given, or gather with `keras_conflux.allgather`.",
    )


def _warn_of_sum(step: Step, target: tf.Tensor) -> None:
    if step.kinds.is_blind or UnclearLosses.of(step).lead_to(target):
        return
    UnclearLosses.of(step).add(target)
    step.warn_once(
        "sum",
        "the graph does not show whether the loss that a GradientTape "
        "differentiates is a sum or a mean over samples, and it is taken for a "
        "mean. Return one value per sample, or a mean.",
    )
