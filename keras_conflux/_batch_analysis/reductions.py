"""The kinds that operations along axes give, such as sums and means."""

from collections.abc import Callable

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import count
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.per_sample import on_last
from keras_conflux._batch_analysis.rule import ANY_ROWS
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import ROWS
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import Claim
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import always
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import rules_of
from keras_conflux._batch_analysis.rule import shape_alone


def _listed_axes(operation: tf.Operation, position: int) -> set[int] | None:
    """Returns the axes that an input lists, if they are known."""
    rank = operation.inputs[0].shape.rank
    axes = tf.get_static_value(operation.inputs[position])
    if axes is None or rank is None:
        return None
    return {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()


def _reduced_axes(operation: tf.Operation) -> set[int] | None:
    rank = operation.inputs[0].shape.rank
    axes = _listed_axes(operation, 1)
    if axes is None and rank is not None:
        is_scalar = operation.outputs[0].shape.rank == 0
        return set(range(rank)) if is_scalar else None
    return axes


def _each_sample(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a reduction of the entries of each sample."""
    kind, axes = inputs[0], _reduced_axes(operation)
    if axes is None or kind.axis in axes:
        return None
    kept = operation.node_def.attr["keep_dims"].b  # `argmax` has none
    before = 0 if kept else sum(axis < kind.axis for axis in axes)
    return kind.at(kind.axis - before)


def _over_samples(kind: Kind) -> Claim:
    """Makes the claim that a reduction over samples is of a kind."""

    def claim(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
        axes = _reduced_axes(operation)
        return kind if axes is not None and inputs[0].axis in axes else None

    return claim


def _mean(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a mean over samples, or of sums over samples."""
    does_round = operation.inputs[0].dtype.is_integer
    if does_round or not inputs[0].regular:
        return None
    is_of_sums = inputs[0].role is not Role.ROWS
    return inputs[0] if is_of_sums else _over_samples(MEAN)(operation, inputs)


def _sum_entries(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Moves or adds up entries of which each is a sum or a mean."""
    return inputs[0] if operation.inputs[0].shape.rank else None


def _entry_count(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the product of a whole shape."""
    is_whole = operation.outputs[0].shape.rank == 0
    return count(inputs[0].regular) if is_whole else None


def _along_axes(position: int) -> tuple[Rule, ...]:
    """Makes the rules of an operation that mixes the entries of listed axes."""

    def others(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
        axes = _listed_axes(operation, position)
        is_apart = axes is not None and inputs[0].axis not in axes
        return inputs[0] if is_apart else None

    return (
        Rule(others, ROWS, Form.EQUAL, ...),
        Rule(shape_alone(like(0)), ANY_ROWS, Form.EQUAL, ...),
    )


def _normed(operation: tf.Operation, inputs: list[Kind]) -> list[Kind] | None:
    """Follows a normalization by moments that are given."""
    found = _biased(operation, inputs)
    if operation.get_attr("is_training") or found is None:
        return None
    return [found, *[DERIVED] * (len(operation.outputs) - 1)]


def _biased(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows an operation by weights of each channel."""
    rank = operation.inputs[0].shape.rank
    layout = operation.get_attr("data_format")
    channels = 1 if layout.startswith(b"NC") else -1
    is_apart = rank is not None and inputs[0].axis != channels % rank
    return inputs[0] if is_apart else None


def _channel_sums(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the gradient by a bias that was added to each sample."""
    if _biased(operation, inputs) is None:
        return None
    return MEAN if inputs[0].divided else TOTAL


def _largest(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `top_k(x, n)`, as sorting `n` samples does."""
    rank = operation.inputs[0].shape.rank
    if not rank or inputs[0].axis != rank - 1:
        return None
    return mixed_rows([Kind(inputs[0].role, entries=Entries.SAME)], rank - 1)


def _grouped(_: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `unsorted_segment_sum(rows, groups, how_many)`."""
    values, groups = inputs[:2]
    if values.axis or groups.axis or values.entries is not groups.entries:
        return None
    return TOTAL


def _scattered_sum(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `scatter_nd(places, rows, shape)`, as a confusion matrix does.

    Values that samples put at the same place are added up.
    """
    places, values, _ = inputs
    tensor = operation.inputs[0]
    if tensor.shape.rank is None or places.axis >= tensor.shape.rank - 1:
        return None
    is_number = not operation.outputs[0].dtype.is_bool
    is_aligned = is_number and places.axis == values.axis
    is_aligned &= places.entries is values.entries
    return TOTAL if is_aligned else None


def after_broadcast(
    operation: tf.Operation, kind_of: Callable[[tf.Tensor], Kind]
) -> list[Kind] | None:
    """Follows the derivative by a tensor that was broadcast.

    It is summed where entries were repeated, and gets the tensor's shape. If
    that has no samples, its entries were repeated for each sample.
    """
    total = operation.inputs[0].op if operation.type == "Reshape" else None
    axes = total.inputs[1].op if total and total.type == "Sum" else None
    if not (total and axes and axes.type == "BroadcastGradientArgs"):
        return None
    kind, shape = kind_of(total.inputs[0]), kind_of(operation.inputs[1])
    if kind.role is Role.ROWS and shape.role is Role.SHAPE:
        return [kind.at(shape.axis)]
    if kind.form in ANY_ROWS and shape == EQUAL and not kind.mixed:
        return [MEAN if kind.divided else TOTAL]
    return None


_EACH = Rule(_each_sample, ROWS, Form.EQUAL)
_OF_PARTS = Rule(_each_sample, Form.DIVIDED, Form.EQUAL)
_MOVED_SUMS = Rule(_sum_entries, LINEAR, Form.EQUAL, ...)
RULES: dict[str, tuple[Rule, ...]] = {
    **rules_of("All Any ArgMax ArgMin EuclideanNorm Max Min ReduceJoin", _EACH),
    "Sum": (
        _EACH,
        Rule(_over_samples(TOTAL), ROWS, Form.EQUAL),
        Rule(like(0), LINEAR, Form.EQUAL),
        _OF_PARTS,
        Rule(_over_samples(MEAN), Form.DIVIDED, Form.EQUAL),
    ),
    "Mean": (
        _EACH,
        Rule(_mean, ROWS, Form.EQUAL),
        Rule(_mean, LINEAR, Form.EQUAL),
        _OF_PARTS,
    ),
    "Prod": (Rule(_entry_count, Form.SHAPE, Form.EQUAL), _EACH),
    "L2Loss": (Rule(always(TOTAL), ROWS),),
    **rules_of("Cumsum ReverseV2", *_along_axes(1), _MOVED_SUMS),
    **rules_of("CumulativeLogsumexp Cumprod", *_along_axes(1)),
    "Roll": (*_along_axes(2), _MOVED_SUMS),
    **rules_of(
        "FFT IFFT LogSoftmax Softmax",
        Rule(on_last(1), ROWS),
        Rule(shape_alone(like(0)), ANY_ROWS),
    ),
    "TopKV2": (
        Rule(on_last(1), ROWS, Form.EQUAL),
        Rule(_largest, ROWS, Form.COUNT),
    ),
    **rules_of(
        "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
        Rule(_normed, ROWS, *[Form.EQUAL] * 4),
    ),
    "BiasAddGrad": (Rule(_channel_sums, ANY_ROWS),),
    "BiasAdd": (
        Rule(_biased, ROWS, SAME),
        Rule(
            shape_alone(_biased),
            ANY_ROWS,
            Form.EQUAL | Form.MEAN | Form.TOTAL | Form.DERIVED,
        ),
    ),
    "UnsortedSegmentSum": (Rule(_grouped, Form.ROWS, Form.ROWS, Form.EQUAL),),
    "ScatterNd": (Rule(_scattered_sum, Form.ROWS, Form.ROWS, Form.EQUAL),),
    "HistogramFixedWidth": (Rule(always(TOTAL), ROWS, Form.EQUAL, Form.EQUAL),),
}
