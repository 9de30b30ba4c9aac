"""The gradients that leave a step: each replica's become the global batch's."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import TypeAlias

import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import parts_of
from keras_conflux._communication import dtypes
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._fit.numerics import sparse_gradients
from keras_conflux._fit.numerics.exit import Exit
from keras_conflux._fit.numerics.exit import TraceFindings
from keras_conflux._fit.numerics.global_values import global_values
from keras_conflux._graphs import bodies
from keras_conflux._graphs import resources
from keras_conflux._graphs import walks
from keras_conflux._graphs.effects import is_collective
from keras_conflux._graphs.effects import only_reads
from keras_conflux._graphs.effects import waits
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import has_samples
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step
from keras_conflux._replication.steps import UserReductions
from keras_conflux._replication.steps import symbolic

Summing: TypeAlias = Callable[[list[Any], list[Any] | None], list[Any]]


class Gradients(Exit):
    """The gradients of a step, from a tape to an optimizer."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.are_computed = False
        """Whether a gradient tape is computing some."""
        self.is_keras_step = False
        """Whether Keras' own `train_step` runs, and not the user's."""
        self.are_accumulated = False
        """Whether those that are applied are reduced at an update only."""
        self._postponed_losses: list[tuple[Any, Summing | None]] = []
        self._postponed: list[Any] = []
        self._summed_by: Summing | None = None
        self.have_built = False
        """Whether an optimizer has been built to apply them."""

    def report(self, findings: TraceFindings) -> None:
        """See `Exit`."""
        findings.built = findings.built or self.have_built

    def postpone(
        self, optimizer: Any, loss: Any, summed_by: "Summing | None" = None
    ) -> None:
        """Leaves the gradients of a loss to an optimizer.

        Keras' own step, and Keras' own `apply`, surely hand them on as is.

        `summed_by` takes gradients and their variables, and sums the gradients
        of all replicas. By default that is done when the optimizer updates.
        """
        surely = self.is_keras_step and not self.step.turns
        if surely and keras_optimizers.applies_as_keras(optimizer):
            self._postponed_losses.append((loss, summed_by))

    def reduced(
        self, targets: list[Any], found: list[Any], sources: list[Any]
    ) -> list[Any]:
        """Returns the result of a tape for sources that all replicas share."""
        for loss, summed_by in self._postponed_losses:
            if any(target is loss for target in targets):
                # `to_apply` knows them again, so they are what it will get.
                found = repeatable(found)
                self._postponed.extend(found)
                self._summed_by = summed_by
                return found
        return summed(found, sources, self.step)

    def to_apply(
        self, grads: list[Any], trained: list[Any] | None, accumulates: bool
    ) -> list[Any]:
        """Returns the gradients of the global batch, or a replica's part.

        A gradient that a tape returned, or that was computed from one, is
        global already. All others, as computed by hand, are reduced here.

        An optimizer that `accumulates` adds them up until it updates. It may
        not have been told which variables are trained.
        """
        known = {id(each) for each in self._postponed}
        are_postponed = all(g is None or id(g) in known for g in grads)
        if self._summed_by is not None and are_postponed:
            return self._summed_by(grads, trained)
        if accumulates and are_postponed:
            grads = shaped(grads, trained)
            return _weighted(grads, trained, has_samples())
        if self._postponed:
            raise RuntimeError(
                f"{self.step.name}: Keras' own `train_step` was expected to "
                "hand the gradients of the tape to the optimizer as they are, "
                "and the optimizer got others. Please report this."
            )
        kind_of = self.step.kinds.of
        if not all(g is None or kind_of(g) == EQUAL for g in grads):
            grads = _made_global(shaped(grads, trained), self.step)
        return self.as_summands(grads, trained) if accumulates else grads

    def as_summands(
        self, grads: list[Any], trained: list[Any] | None
    ) -> list[Any]:
        """Returns a replica's share of gradients that are global already.

        The copies of accumulators are added up. In loops, the first has all.
        """
        share = self.step.device_fraction
        if share is None:
            share = tf.where(tf.equal(rank_as_tensor(), 0), 1.0, 0.0)
        return _weighted(grads, trained, share)

    def warn_if_local(self, grads: list[Any], trained: list[Any]) -> None:
        """Warns of gradients that the user is to reduce, and has not."""
        if tf.executing_eagerly():  # nothing tells where a tensor comes from
            return
        reductions = UserReductions.of(self.step)
        known = {*map(id, reductions.operations())}
        local = [i for i, g in enumerate(grads) if reductions.are_missing([g])]
        found = symbolic(grads)
        made_of = walks.walked(found, walks.made_of)
        made_by = [x.op for x in made_of if not bodies.is_eager(x)]
        past = walks.walked(found, walks.made_past(is_collective, {}))
        if not local and (
            any(id(x) in known or is_collective(x) for x in made_by)
            or all(x.op.type == "Placeholder" for x in found)  # writes tell
            or are_alike([*past], reductions)
        ):
            return
        some = trained and 0 < len(local) < sum(g is not None for g in grads)
        of = f" (of {state.name_of(trained[local[0]])})" if some else ""
        self.step.warn_once(
            "local gradients",
            "an optimizer applies gradients that no `allreduce` has touched"
            f"{of}, so the replicas are about to drift apart. Call "
            "`gradients = keras_conflux.allreduce('mean', gradients, "
            "weight=len(x))` before it, where `x` is the replica's part of the "
            "batch.",
        )


def are_alike(made_of: list[tf.Tensor], reductions: UserReductions) -> bool:
    """Whether what tensors make is the same on all replicas of a loop.

    So are equal copies, constants, and what collectives return. A replica that
    knows its rank may have constants of its own.
    """
    kept = [x for x in map(resources.container_of, made_of) if x is not None]
    traced = [x.op for x in made_of if not bodies.is_eager(x)]
    return (
        not reductions.know_rank()
        and all(map(state.is_mirrored, kept))
        and {*map(id, reductions.own)}.isdisjoint(map(id, made_of))
        and all(only_reads(x) or waits(x) for x in traced)
    )


def summed(grads: list[Any], sources: list[Any], step: Step) -> list[Any]:
    """Sums the gradients of all replicas, which have their weights already.

    Of weights that lie in parts, a tape has parts of sums, which are gathered.
    """
    ways = [_way_to_sum(source) for source in sources]
    found = list(grads)
    for way in (_whole_sums, _maxima, _gathered):
        places = [i for i, each in enumerate(ways) if each is way]
        if places:
            own = [grads[i] for i in places], [sources[i] for i in places]
            for i, each in zip(places, way(*own, step), strict=True):
                found[i] = each
    step.kinds.mark_equal(found)
    return found


def _way_to_sum(source: Any) -> Callable:
    if state.is_in_parts(source):
        return _gathered
    return _maxima if is_overwritten(source) else _whole_sums


def _gathered(grads: list[Any], sources: list[Any], _: Step) -> list[Any]:
    """Returns whole gradients of variables that lie in parts."""
    given = [g for g in grads if g is not None]
    flats = iter(replica_collectives().joined(given))
    return [
        None if g is None else state.backing(x).layout.whole(next(flats))
        for g, x in zip(grads, sources, strict=True)
    ]


def _whole_sums(grads: list[Any], sources: list[Any], step: Step) -> list[Any]:
    grads = shaped(repeatable(grads), sources)
    return sparse_gradients.summed(grads, sources, step)


def _maxima(values: list[Any], sources: list[Any], _: Step) -> list[Any]:
    """Returns the largest of the values with which Keras overwrites variables.

    They are scales in float8, which are equal, and largest magnitudes.
    """
    present = has_samples()
    values = [dtypes.weighted(x, present) for x in shaped(values, sources)]
    return replica_collectives().all_reduce("max", values)


def _weighted(
    grads: list[Any], trained: list[Any] | None, weight: tf.Tensor | None
) -> list[Any]:
    """Returns summands of gradients. Gradients of parts are sums already."""
    found = [dtypes.weighted(each, weight) for each in grads]
    for i, variable in enumerate(trained or []):
        if grads[i] is not None and state.is_in_parts(variable):
            layout = keras_variables.backing(variable).layout
            found[i] = layout.own_part(grads[i], rank_as_tensor())
    return found


def _made_global(grads: list[Any], step: Step) -> list[Any]:
    given = [g for g in grads if g is not None]
    made_by = walks.walked((x.op for x in symbolic(given)), walks.before)
    # TensorFlow's function names its operations so, and a tape otherwise.
    if any("gradients" in x.name and is_collective(x) for x in made_by):
        step.warn_once(
            "unknown gradients",
            "an optimizer applies gradients of `tf.gradients` that have passed "
            "an exchange of replicas, as of a synchronized normalization, "
            "without the weights that a `tf.GradientTape` gives. Write one.",
        )
    parts = [x for g in given for x in parts_of(g)]
    try:
        values = iter(global_values(parts, step))
        return [None if g is None else _like(g, values) for g in grads]
    except NotDerivable as error:
        step.warn_once(
            "unknown gradients",
            "the graph does not show how gradients that an optimizer applies "
            f"are computed from the samples (at {error}). The replicas' values "
            "are averaged. Compute them by a `tf.GradientTape` of a loss, or "
            "from `keras_conflux.allreduce` of the replicas' values.",
        )
    fraction = step.batch_fraction
    return replica_collectives().weighted_sum([*map(dense, grads)], fraction)


def _like(grad: Any, parts: Iterator[tf.Tensor]) -> Any:
    """Returns a gradient of other parts."""
    if not isinstance(grad, tf.IndexedSlices):
        return next(parts)
    return tf.IndexedSlices(next(parts), next(parts), grad.dense_shape)


def shaped(grads: list[Any], trained: list[Any] | None) -> list[Any]:
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


def repeatable(grads: list[Any]) -> list[Any]:
    """Makes sparse gradients dense on GPUs, before they are reduced.

    There, rows that occur twice are added up in any order, so that applying
    the same sparse gradient would give each replica other roundings.
    """
    return [*map(dense, grads)] if replica_collectives().on_gpu else grads


def dense(gradient: Any) -> Any:
    """Makes a gradient dense, if it is sparse."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # XLA would give a sum of two axes the layout of its indices, turned or not.
    rows, shape = tf.expand_dims(gradient.values, 1), gradient.dense_shape
    if shape is None:
        return tf.convert_to_tensor(gradient)  # which names the missing shape
    sums = tf.math.unsorted_segment_sum(rows, gradient.indices, shape[0])
    return tf.reshape(sums, shape)


def is_overwritten(variable: Any) -> bool:
    """Whether Keras puts the gradient of a variable in place of its value."""
    return getattr(variable, "overwrite_with_gradient", False)


def hold_everywhere(condition: tf.Tensor) -> tf.Tensor:
    """Whether a condition of gradients holds on all replicas."""
    flag = tf.cast(condition, tf.int32)
    return replica_collectives().all_reduce("min", flag) > 0
