"""The kinds that operations give which move, repeat, group or rank samples."""

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import LINEAR_ROLES
from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.defaults import recomputed
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import TOTAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import rows


def _tile(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind, times = inputs
    known = tf.get_static_value(operation.inputs[1], partial=True)
    if kind.role in LINEAR_ROLES and times == EQUAL:
        return kind
    if kind == EQUAL and times.role is Role.SHAPE:
        return rows(times.axis, times.regular)
    if kind.role is not Role.ROWS or times != EQUAL:
        return recomputed(operation, inputs)
    if kind.axis is None or known is None or known[kind.axis] != 1:
        return recomputed(operation, inputs)
    return kind


def _pad(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind, *others = inputs
    known = tf.get_static_value(operation.inputs[1])
    if kind.role is not Role.ROWS or any(each != EQUAL for each in others):
        return recomputed(operation, inputs)
    if kind.axis is None or known is None or known[kind.axis].any():
        return recomputed(operation, inputs)
    return kind


def _slice(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    kind, *others = inputs
    if kind.role is not Role.ROWS or kind.axis is None:
        return recomputed(operation, inputs)
    begin, size = (
        tf.get_static_value(each, partial=True) for each in operation.inputs[1:]
    )
    if begin is not None and size is not None:
        whole = begin[kind.axis] == 0 and size[kind.axis] == -1
        if whole and others == [EQUAL, EQUAL]:
            return kind
    return recomputed(operation, inputs)


def _along_last_axis(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Ranks or transforms the entries of the last axis."""
    kind = inputs[0]
    rank = operation.inputs[0].shape.rank
    apart = (
        kind.role is Role.ROWS
        and rank is not None
        and kind.axis != rank - 1
        and all(each == EQUAL for each in inputs[1:])
    )
    return kind if apart else recomputed(operation, inputs)


def _place_of_extreme(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `argmax(x, axis)`."""
    kind = inputs[0]
    axis = tf.get_static_value(operation.inputs[1])
    rank = operation.inputs[0].shape.rank
    if kind.role is not Role.ROWS or kind.axis is None or not rank:
        return recomputed(operation, inputs)
    if axis is None or int(axis) % rank == kind.axis:
        return recomputed(operation, inputs)
    return kind.at(kind.axis - (int(axis) % rank < kind.axis))


def _of_matrices(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows what one matrix each gives, where samples have matrices."""
    ranks = [
        tensor.shape.rank
        for tensor, kind in zip(operation.inputs, inputs, strict=True)
        if kind.role is Role.ROWS
    ]
    if ranks and all(rank is not None and rank > 2 for rank in ranks):
        return of_any(operation, operation.outputs[0], inputs)
    return recomputed(operation, inputs)


def _gather_nd(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    values, indices = inputs
    last = (operation.inputs[1].shape.rank or 0) - 1
    if values == EQUAL and indices.role is Role.ROWS and indices.axis != last:
        return indices
    return recomputed(operation, inputs)


def _grouped_sum(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `unsorted_segment_sum(rows, groups, how_many)`."""
    values, groups, count = inputs
    if values == groups == rows(0) and count == EQUAL:
        return TOTAL
    return recomputed(operation, inputs)


_RECOMPUTED = (
    "BatchToSpace BatchToSpaceND Bincount BroadcastGradientArgs "
    "DenseBincount DynamicPartition DynamicStitch HistogramFixedWidth "
    "InvertPermutation ListDiff MirrorPad MirrorPadGrad ParallelDynamicStitch "
    "ReverseSequence ScatterNd SegmentMax SegmentMean SegmentMin SegmentProd "
    "SegmentSum SpaceToBatch SpaceToBatchND SparseSegmentMean SparseSegmentSum "
    "SparseToDense StridedSliceGrad TensorScatterAdd TensorScatterMax "
    "TensorScatterMin TensorScatterSub TensorScatterUpdate "
    "UniqueWithCounts UniqueWithCountsV2 UnsortedSegmentMax "
    "UnsortedSegmentMin UnsortedSegmentProd"
)
_MATRICES = (
    "Cholesky Eig LogMatrixDeterminant Lu MatrixBandPart MatrixDeterminant "
    "MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixExponential "
    "MatrixInverse MatrixLogarithm MatrixSetDiag MatrixSetDiagV2 "
    "MatrixSetDiagV3 MatrixSolve MatrixSolveLs MatrixSquareRoot "
    "MatrixTriangularSolve Qr SelfAdjointEigV2 Svd"
)
_LAST_AXIS = "FFT IFFT IRFFT NthElement RFFT TopK TopKV2"
RULES: dict[str, Rule] = {
    **dict.fromkeys(_RECOMPUTED.split(), recomputed),
    **dict.fromkeys(_MATRICES.split(), _of_matrices),
    **dict.fromkeys(_LAST_AXIS.split(), _along_last_axis),
    **dict.fromkeys(("ArgMax", "ArgMin"), _place_of_extreme),
    **dict.fromkeys(("Pad", "PadV2"), _pad),
    "GatherNd": _gather_nd,
    "Slice": _slice,
    "Tile": _tile,
    "UnsortedSegmentSum": _grouped_sum,
}
