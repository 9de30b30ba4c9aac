"""The kinds that operations give which repeat, fill up or group samples."""

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.rule import LINEAR
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.shapes import TILED


def _tile(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a repetition of the entries of each sample."""
    known = tf.get_static_value(operation.inputs[1], partial=True)
    kind = inputs[0]
    return kind if known is not None and known[kind.axis] == 1 else None


def _unchanged(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Repeats entries of which each is a sum or a mean over samples."""
    del operation
    return inputs[0]


def _pad(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows padding around the entries of each sample."""
    known = tf.get_static_value(operation.inputs[1])
    kind = inputs[0]
    return kind if known is not None and not known[kind.axis].any() else None


def _grouped_sum(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `unsorted_segment_sum(rows, groups, how_many)`."""
    del operation
    values, groups, _ = inputs
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


def _counted(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows how often each number occurs, of all samples or in each."""
    numbers, _, weights = inputs
    rank = operation.inputs[0].shape.rank
    is_binary = operation.get_attr("binary_output")
    of_rows = [kind for kind in inputs if kind.role is Role.ROWS]
    if weights.role is not Role.ROWS and (
        operation.inputs[2].shape.num_elements() != 0
    ):
        return None
    if any(
        kind.axis or kind.entries is not numbers.entries for kind in of_rows
    ):
        return None
    if rank == 2:
        return numbers
    return TOTAL if rank == 1 and not is_binary else None


def _histogram(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows how many numbers lie in each of some intervals."""
    del operation, inputs
    return TOTAL


_ROWS = Form.ROWS | Form.JOINED
RULES: dict[str, tuple[Rule, ...]] = {
    "Tile": (
        Rule(_tile, _ROWS | Form.DIVIDED, Form.EQUAL),
        Rule(_unchanged, LINEAR, Form.EQUAL),
        *TILED,
    ),
    "Pad": (Rule(_pad, _ROWS | Form.DIVIDED, Form.EQUAL),),
    "MirrorPad": (Rule(_pad, _ROWS | Form.DIVIDED, Form.EQUAL),),
    "MirrorPadGrad": (Rule(_pad, _ROWS | Form.DIVIDED, Form.EQUAL),),
    "HistogramFixedWidth": (Rule(_histogram, _ROWS, Form.EQUAL, Form.EQUAL),),
    "DenseBincount": (
        Rule(_counted, Form.ROWS, Form.EQUAL, Form.ROWS | Form.EQUAL),
    ),
    "PadV2": (Rule(_pad, _ROWS, Form.EQUAL, Form.EQUAL),),
    "UnsortedSegmentSum": (
        Rule(_grouped_sum, Form.ROWS, Form.ROWS, Form.EQUAL),
    ),
    "ScatterNd": (Rule(_scattered_sum, Form.ROWS, Form.ROWS, Form.EQUAL),),
}
