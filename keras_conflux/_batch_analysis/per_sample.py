"""The kinds of the results of operations that treat each sample alone."""

import dataclasses

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import combined
from keras_conflux._batch_analysis.kinds import kind_of_filled
from keras_conflux._batch_analysis.rule import ANY_ROWS
from keras_conflux._batch_analysis.rule import ROWS
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import Claim
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._batch_analysis.rule import like
from keras_conflux._batch_analysis.rule import rows_among
from keras_conflux._batch_analysis.rule import rules_of


def _each(_: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a computation of each entry along the first axis."""
    of_rows = rows_among(inputs)
    if any(kind.axis != 0 for kind in of_rows):
        return None
    return combined(of_rows, 0)


def _of_sizes(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the gradient of a convolution by the images."""
    return None if inputs[0].axis else _each(operation, inputs[1:])


def on_last(count: int) -> Claim:
    """Makes the claim of an operation on the last axes of the first input."""

    def claim(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
        rank = operation.inputs[0].shape.rank
        of_rows = rows_among(inputs)
        axis = of_rows[0].axis
        if rank is None or axis >= rank - count:
            return None
        if any(kind.axis != axis for kind in of_rows):
            return None
        return combined(of_rows, axis)

    return claim


def _one_hot(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    rank = operation.outputs[0].shape.rank
    if rank is None:
        return None
    new = operation.get_attr("axis") % rank
    return inputs[0].at(inputs[0].axis + (inputs[0].axis >= new))


def _pad(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows padding around the entries of each sample."""
    known = tf.get_static_value(operation.inputs[1])
    kind = inputs[0]
    return kind if known is not None and not known[kind.axis].any() else None


def _to_tensor(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `ragged.to_tensor(default, shape)`.

    Where the shape is left open, rows are as long as the longest sample of the
    shard, which one device would fill up to the longest of the batch.
    """
    _, values, _, *beginnings = inputs
    size, *others = operation.outputs[0].shape.as_list() or [None, None]
    if size is not None or None in others:
        return None
    return kind_of_filled(values, beginnings)


def _split_strings(_: tf.Operation, inputs: list[Kind]) -> list[Kind] | None:
    """Follows the words of each string, in a sparse tensor."""
    if inputs[0].axis or inputs[0].entries is not Entries.ONE:
        return None
    words = inputs[0].with_entries(Entries.VARYING)
    return [dataclasses.replace(words, are_positions=True), words, DERIVED]


_WITH_WEIGHTS = Rule(_each, ROWS, SAME)
RULES: dict[str, tuple[Rule, ...]] = {
    **rules_of(
        "AvgPool AvgPool3D DepthToSpace ExtractImagePatches "
        "ExtractVolumePatches LRN MaxPool MaxPool3D SpaceToDepth",
        Rule(_each, ROWS),
    ),
    **rules_of("Conv2D Conv3D DepthwiseConv2dNative Dilation2D", _WITH_WEIGHTS),
    **rules_of(
        "Fingerprint ResizeArea ResizeBicubic ResizeBilinear "
        "ResizeNearestNeighbor ResizeNearestNeighborGrad",
        Rule(_each, ROWS, Form.EQUAL),
    ),
    **rules_of(
        "ResizeBicubicGrad ResizeBilinearGrad SoftmaxCrossEntropyWithLogits "
        "SparseSoftmaxCrossEntropyWithLogits",
        Rule(_each, ROWS, ROWS),
    ),
    **rules_of(
        "DrawBoundingBoxesV2 InTopKV2", Rule(_each, ROWS, ROWS, Form.EQUAL)
    ),
    **rules_of(
        "Conv2DBackpropInput Conv3DBackpropInputV2 "
        "DepthwiseConv2dNativeBackpropInput",
        Rule(_of_sizes, Form.SHAPE, SAME, Form.ROWS),
    ),
    **rules_of(
        "AvgPoolGrad AvgPool3DGrad", Rule(_of_sizes, Form.SHAPE, Form.ROWS)
    ),
    **rules_of("LRNGrad MaxPoolGrad MaxPool3DGrad", Rule(_each, *[ROWS] * 3)),
    "Dilation2DBackpropInput": (Rule(_each, ROWS, Form.EQUAL, ROWS),),
    "ImageProjectiveTransformV3": (Rule(_each, ROWS, ROWS, Form.EQUAL, SAME),),
    "Cross": (Rule(on_last(1), ROWS, ROWS),),
    **rules_of("HSVToRGB MatrixDiag RGBToHSV", Rule(on_last(1), ROWS)),
    **rules_of(
        "AdjustHue AdjustSaturation IRFFT NthElement RFFT",
        Rule(on_last(1), ROWS, Form.EQUAL),
    ),
    "FakeQuantWithMinMaxVarsPerChannel": (
        Rule(on_last(1), ROWS, Form.EQUAL, Form.EQUAL),
    ),
    **rules_of(
        "MatrixDiagV2 MatrixDiagV3", Rule(on_last(1), ROWS, *[Form.EQUAL] * 4)
    ),
    **rules_of(
        "Cholesky Eig FFT2D IFFT2D LogMatrixDeterminant Lu MatrixDeterminant "
        "MatrixDiagPart MatrixInverse MatrixLogarithm MatrixSquareRoot Qr "
        "SelfAdjointEigV2 Svd",
        Rule(on_last(2), ROWS),
    ),
    "MatrixSetDiagV3": (Rule(on_last(2), ROWS, ROWS, Form.EQUAL),),
    **rules_of("IRFFT2D RFFT2D", Rule(on_last(2), ROWS, Form.EQUAL)),
    **rules_of(
        "MatrixBandPart MatrixDiagPartV2 MatrixDiagPartV3",
        Rule(on_last(2), ROWS, Form.EQUAL, Form.EQUAL),
    ),
    **rules_of("FFT3D IFFT3D", Rule(on_last(3), ROWS)),
    **rules_of(
        "AdjustContrastv2 IRFFT3D RFFT3D", Rule(on_last(3), ROWS, Form.EQUAL)
    ),
    "OneHot": (Rule(_one_hot, ROWS, Form.EQUAL, SAME, SAME),),
    **rules_of("MirrorPad MirrorPadGrad Pad", Rule(_pad, ANY_ROWS, Form.EQUAL)),
    "PadV2": (Rule(_pad, ROWS, Form.EQUAL, Form.EQUAL),),
    "LookupTableFindV2": (Rule(like(1), Form.EQUAL, ROWS, Form.EQUAL),),
    "RaggedTensorToTensor": (
        Rule(_to_tensor, Form.EQUAL, Form.ROWS, Form.EQUAL, Form.OPAQUE, ...),
    ),
    "StringSplitV2": (Rule(_split_strings, Form.ROWS, Form.EQUAL),),
}
