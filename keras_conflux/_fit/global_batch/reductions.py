"""The kinds that operations along axes give, such as sums and means."""

from collections.abc import Callable

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import LINEAR_ROLES
from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.kinds import DERIVED
from keras_conflux._fit.global_batch.kinds import MEAN
from keras_conflux._fit.global_batch.kinds import OPAQUE
from keras_conflux._fit.global_batch.kinds import TOTAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import count
from keras_conflux._fit.global_batch.kinds import rows


def _axes(operation: tf.Operation) -> set[int] | None:
    """Returns the axes that a reduction removes or keeps with size 1."""
    rank = operation.inputs[0].shape.rank
    axes = tf.get_static_value(operation.inputs[1])
    if axes is None or rank is None:
        scalar = operation.outputs[0].shape.rank == 0
        return set(range(rank)) if scalar and rank is not None else None
    return {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()


def _reduced_rows(operation: tf.Operation, kind: Kind) -> Kind | None:
    """Returns the kind if the samples' axis stays, `None` if it is reduced."""
    axes = _axes(operation)
    rank = operation.inputs[0].shape.rank
    if rank is not None and axes == set(range(rank)):
        return None
    if axes is None or kind.axis is None:
        return OPAQUE
    if kind.axis in axes:
        return None
    kept = operation.get_attr("keep_dims")
    before = 0 if kept else sum(axis < kind.axis for axis in axes)
    return kind.at(kind.axis - before)


def _reduction(of_samples: Callable[[Kind], Kind], linear: bool) -> Callable:
    """Makes the rule of a reduction.

    Args:
        of_samples: What it makes of ROWS whose samples it reduces.
        linear: Whether it keeps sums and means of samples what they are.
    """

    def rule(operation: tf.Operation, inputs: list[Kind]) -> Kind:
        kind = inputs[0]
        if kind.role is Role.ROWS:
            return _reduced_rows(operation, kind) or of_samples(kind)
        if linear and kind.role in LINEAR_ROLES:
            return kind
        return of_any(operation, operation.outputs[0], inputs)

    return rule


def _sum_of_samples(kind: Kind) -> Kind:
    if kind.mixed or kind.places:
        return DERIVED
    return MEAN if kind.divided else TOTAL


def _mean_of_samples(kind: Kind) -> Kind:
    return MEAN if kind.regular and not kind.is_entangled else DERIVED


def _product_of_entries(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    if kind.role is Role.SHAPE and operation.outputs[0].shape.rank == 0:
        return count(kind.regular)
    return _reduction(lambda _: DERIVED, linear=False)(operation, inputs)


def _along_one_axis(position: int) -> Callable:
    """Makes the rule of an operation that mixes the entries of one axis."""

    def rule(operation: tf.Operation, inputs: list[Kind]) -> Kind:
        kind = inputs[0]
        output = operation.outputs[0]
        if kind.role is not Role.ROWS or kind.axis is None:
            return of_any(operation, output, inputs)
        rank = operation.inputs[0].shape.rank
        axes = tf.get_static_value(operation.inputs[position])
        if axes is None or rank is None:
            return rows(kind.axis, kind.regular, mixed=True)
        listed = axes.reshape(-1)
        if kind.axis in {int(axis) % rank for axis in listed}:
            return rows(kind.axis, kind.regular, mixed=True)
        return kind

    return rule


def _softmax(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind = inputs[0]
    rank = operation.inputs[0].shape.rank
    if kind.role is Role.ROWS and kind.axis is not None and rank is not None:
        return DERIVED if kind.axis == rank - 1 else kind
    return of_any(operation, operation.outputs[0], inputs)


def _batch_norm(operation: tf.Operation, inputs: list[Kind]) -> list[Kind]:
    """Normalizes by the moments of the replica, unless it gets moments."""
    others = [MEAN] * (len(operation.outputs) - 1)
    return [inputs[0], *others]


_extreme = _reduction(lambda _: DERIVED, linear=False)
RULES: dict[str, Rule] = {
    **dict.fromkeys(("Max", "Min", "All", "Any", "EuclideanNorm"), _extreme),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(
        ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), _batch_norm
    ),
    "Sum": _reduction(_sum_of_samples, linear=True),
    "Mean": _reduction(_mean_of_samples, linear=True),
    "Prod": _product_of_entries,
    "Cumsum": _along_one_axis(1),
    "Cumprod": _along_one_axis(1),
    "CumulativeLogsumexp": _along_one_axis(1),
    "ReverseV2": _along_one_axis(1),
    "Roll": _along_one_axis(2),
}
