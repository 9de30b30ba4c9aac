"""The kinds that operations along axes give, such as sums and means."""

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import count
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import Rule


def listed_axes(operation: tf.Operation, position: int) -> set[int] | None:
    """Returns the axes that an input lists, if they are known."""
    rank = operation.inputs[0].shape.rank
    axes = tf.get_static_value(operation.inputs[position])
    if axes is None or rank is None:
        return None
    return {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()


def _reduced_axes(operation: tf.Operation) -> set[int] | None:
    rank = operation.inputs[0].shape.rank
    axes = listed_axes(operation, 1)
    if axes is None and rank is not None:
        is_scalar = operation.outputs[0].shape.rank == 0
        return set(range(rank)) if is_scalar else None
    return axes


def _rows_kept(operation: tf.Operation, kind: Kind) -> Kind | None:
    axes = _reduced_axes(operation)
    if axes is None or kind.axis in axes:
        return None
    kept = operation.get_attr("keep_dims")
    before = 0 if kept else sum(axis < kind.axis for axis in axes)
    return kind.at(kind.axis - before)


def _each_sample(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a reduction of the entries of each sample."""
    return _rows_kept(operation, inputs[0])


def _are_samples_reduced(operation: tf.Operation, kind: Kind) -> bool:
    axes = _reduced_axes(operation)
    return axes is not None and kind.axis in axes


def _sum(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    return TOTAL if _are_samples_reduced(operation, inputs[0]) else None


def _sum_of_parts(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Adds up rows that were divided by the number of samples."""
    return MEAN if _are_samples_reduced(operation, inputs[0]) else None


def _mean(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    is_mean = _are_samples_reduced(operation, inputs[0])
    is_mean &= inputs[0].regular and not _does_round(operation)
    return MEAN if is_mean else None


def _does_round(operation: tf.Operation) -> bool:
    """Whether it is a mean of integers, which is one itself."""
    return operation.type == "Mean" and operation.inputs[0].dtype.is_integer


def _linear(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Adds up entries of a sum or a mean over samples."""
    return None if _does_round(operation) else inputs[0]


def _entries_of_sums(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind | None:
    """Moves or adds up entries of which each is a sum or a mean."""
    return inputs[0] if operation.inputs[0].shape.rank else None


def _number_of_entries(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind | None:
    """Follows the product of a whole shape."""
    if operation.outputs[0].shape.rank != 0:
        return None
    return count(inputs[0].regular)


def _sum_of_squares(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    del operation, inputs
    return TOTAL


def along_axes(position: int, is_linear: bool = False) -> tuple[Rule, ...]:
    """Makes the rules of an operation that mixes the entries of some axes.

    Args:
        position: The position of the input that lists them.
        is_linear: Whether it makes of each entry a sum of others, or takes one.
    """

    def others(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
        axes = listed_axes(operation, position)
        if axes is None or inputs[0].axis in axes:
            return None
        return inputs[0]

    rules = (
        Rule(others, _ROWS, Form.EQUAL, ...),
        Rule(_same_shape, _ANY_ROWS, Form.EQUAL, ...),
    )
    sums = (Rule(_entries_of_sums, LINEAR, Form.EQUAL, ...),)
    return rules + sums if is_linear else rules


def _last_axis(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    rank = operation.inputs[0].shape.rank
    return inputs[0] if rank and inputs[0].axis != rank - 1 else None


def _same_shape(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    del operation
    return mixed_rows(inputs[:1], inputs[0].axis)


def _normalized(
    operation: tf.Operation, inputs: list[Kind]
) -> list[Kind] | None:
    """Follows a normalization by moments that are given."""
    channels = _channels(operation)
    rank = operation.inputs[0].shape.rank
    if operation.get_attr("is_training") or rank is None:
        return None
    if inputs[0].axis == channels % rank:
        return None
    others = [DERIVED] * (len(operation.outputs) - 1)
    return [inputs[0], *others]


def _channels(operation: tf.Operation) -> int:
    """Returns the axis that weights belong to."""
    if operation.type == "BiasAddV1":
        return -1
    layout = operation.get_attr("data_format")
    return 1 if layout.startswith(b"NC") else -1


def _biased(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    rank = operation.inputs[0].shape.rank
    if rank is None or inputs[0].axis == _channels(operation) % rank:
        return None
    return inputs[0]


def _sum_per_channel(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind | None:
    """Follows the gradient by a bias that was added to each sample."""
    if _biased(operation, inputs) is None:
        return None
    return MEAN if inputs[0].divided else TOTAL


def _biased_shape(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    found = _biased(operation, inputs)
    return None if found is None else mixed_rows([found], found.axis)


def _place_of_extreme(
    operation: tf.Operation, inputs: list[Kind]
) -> Kind | None:
    """Follows `argmax(x, axis)`."""
    axes = listed_axes(operation, 1)
    if axes is None or inputs[0].axis in axes:
        return None
    return inputs[0].at(inputs[0].axis - (min(axes) < inputs[0].axis))


def _largest(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `top_k(x, n)`, as sorting `n` samples does."""
    rank = operation.inputs[0].shape.rank
    if not rank or inputs[0].axis != rank - 1:
        return None
    return mixed_rows([Kind(inputs[0].role, entries=Entries.SAME)], rank - 1)


_ROWS = Form.ROWS | Form.JOINED
_ANY_ROWS = _ROWS | Form.DIVIDED
_EACH = Rule(_each_sample, _ROWS, Form.EQUAL)
_OF_PARTS = Rule(_each_sample, Form.DIVIDED, Form.EQUAL)
_SUM_OF_PARTS = Rule(_sum_of_parts, Form.DIVIDED, Form.EQUAL)
_LINEAR = Rule(_linear, LINEAR, Form.EQUAL)
RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("Max", "Min", "All", "Any", "EuclideanNorm"), (_EACH,)),
    "Sum": (
        _EACH,
        Rule(_sum, _ROWS, Form.EQUAL),
        _LINEAR,
        _OF_PARTS,
        _SUM_OF_PARTS,
    ),
    "Mean": (_EACH, Rule(_mean, _ROWS, Form.EQUAL), _LINEAR, _OF_PARTS),
    "ReduceJoin": (_EACH,),
    "Prod": (Rule(_number_of_entries, Form.SHAPE, Form.EQUAL), _EACH),
    "L2Loss": (Rule(_sum_of_squares, _ROWS),),
    **dict.fromkeys(("Cumsum", "ReverseV2"), along_axes(1, is_linear=True)),
    **dict.fromkeys(("Cumprod", "CumulativeLogsumexp"), along_axes(1)),
    "Roll": along_axes(2, is_linear=True),
    **dict.fromkeys(
        ("Softmax", "LogSoftmax", "FFT", "IFFT"),
        (Rule(_last_axis, _ROWS), Rule(_same_shape, _ANY_ROWS)),
    ),
    **dict.fromkeys(
        ("RFFT", "IRFFT", "NthElement"), (Rule(_last_axis, _ROWS, Form.EQUAL),)
    ),
    "TopKV2": (
        Rule(_last_axis, _ROWS, Form.EQUAL),
        Rule(_largest, _ROWS, Form.COUNT),
    ),
    **dict.fromkeys(
        ("ArgMax", "ArgMin"), (Rule(_place_of_extreme, _ROWS, Form.EQUAL),)
    ),
    **dict.fromkeys(
        ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
        (Rule(_normalized, _ROWS, *[Form.EQUAL] * 4),),
    ),
    "BiasAddGrad": (Rule(_sum_per_channel, _ANY_ROWS),),
    **dict.fromkeys(
        ("BiasAdd", "BiasAddV1"),
        (
            Rule(_biased, _ROWS, Form.EQUAL | Form.RANDOM),
            Rule(
                _biased_shape,
                _ANY_ROWS,
                Form.EQUAL | Form.MEAN | Form.TOTAL | Form.DERIVED,
            ),
        ),
    ),
}
