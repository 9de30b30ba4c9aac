"""The kinds of the results of operations that treat each sample alone.

Their first axis is the axis of the samples, as in images that are convolved.
"""

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import combined
from keras_conflux._batch_analysis.rule import SAME
from keras_conflux._batch_analysis.rule import Rule


def _first_axis(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a computation of each entry along the first axis."""
    del operation
    of_rows = [kind for kind in inputs if kind.role is Role.ROWS]
    if any(kind.axis != 0 for kind in of_rows):
        return None
    return combined(of_rows, 0)


def _of_sizes(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the gradient of a convolution by the images."""
    return None if inputs[0].axis else _first_axis(operation, inputs[1:])


def _of_matrices(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a computation of one matrix of each sample."""
    given = list(zip(operation.inputs, inputs, strict=True))
    for tensor, kind in given:
        rank = tensor.shape.rank
        if rank is None or (kind.role is Role.ROWS and kind.axis >= rank - 2):
            return None
        if kind.role is not Role.ROWS and rank > 2:
            return None
    return _of_one_axis(inputs)


def _of_one_axis(inputs: list[Kind]) -> Kind | None:
    of_rows = [kind for kind in inputs if kind.role is Role.ROWS]
    axis = of_rows[0].axis
    if any(kind.axis != axis for kind in of_rows):
        return None
    return combined(of_rows, axis)


def _of_vectors(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a computation of the last axis."""
    rank = operation.inputs[0].shape.rank
    if rank is None or inputs[0].axis >= rank - 1:
        return None
    return inputs[0]


def _diagonals(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    rank = operation.inputs[0].shape.rank
    if rank is None or inputs[0].axis >= rank - 2:
        return None
    return _of_one_axis(inputs[:2])


def _one_hot(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    rank = operation.outputs[0].shape.rank
    if rank is None:
        return None
    new = operation.get_attr("axis") % rank
    return inputs[0].at(inputs[0].axis + (inputs[0].axis >= new))


def _losses(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows crossentropies, of samples that all have their targets."""
    if any(kind.role is not Role.ROWS for kind in inputs[:2]):
        return None
    return _first_axis(operation, inputs)


def _last_axes(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows a computation of the last axes of images."""
    rank = operation.inputs[0].shape.rank
    if rank is None or inputs[0].axis >= rank - _AXES_OF_ONE[operation.type]:
        return None
    return inputs[0]


def _crossed(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows products of vectors of three numbers."""
    rank = operation.inputs[0].shape.rank
    if rank is None or inputs[0].axis >= rank - 1:
        return None
    return _of_one_axis(inputs)


def _searched(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows the places of each sample's number among sorted ones."""
    del operation
    return inputs[1] if inputs[1].axis == 1 else None


_AXES_OF_ONE = {
    "AdjustContrastv2": 3,
    "AdjustHue": 1,
    "MatrixBandPart": 2,
    "MatrixDiagPart": 2,
    "MatrixDiagPartV2": 2,
    "MatrixDiagPartV3": 2,
    "AdjustSaturation": 1,
    "RGBToHSV": 1,
    "HSVToRGB": 1,
    "FFT2D": 2,
    "IFFT2D": 2,
    "FFT3D": 3,
    "IFFT3D": 3,
    "RFFT2D": 2,
    "IRFFT2D": 2,
    "RFFT3D": 3,
    "IRFFT3D": 3,
}
_ROWS = Form.ROWS | Form.JOINED
_ALONE = (
    "AvgPool AvgPool3D DepthToSpace ExtractImagePatches ExtractVolumePatches "
    "LRN MaxPool MaxPool3D SpaceToDepth"
)
_WITH_WEIGHTS = "Conv2D Conv3D DepthwiseConv2dNative Dilation2D"
_RESIZED = "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor"
_BACKWARDS = (
    "Conv2DBackpropInput Conv3DBackpropInputV2 "
    "DepthwiseConv2dNativeBackpropInput"
)
_OF_OUTPUTS = "LRNGrad MaxPoolGrad MaxPool3DGrad"
_MATRICES = (
    "Cholesky Eig LogMatrixDeterminant MatrixDeterminant "
    "MatrixInverse MatrixLogarithm MatrixSquareRoot Qr "
    "SelfAdjointEigV2 Svd Lu"
)
RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_ALONE.split(), (Rule(_first_axis, _ROWS),)),
    **dict.fromkeys(_WITH_WEIGHTS.split(), (Rule(_first_axis, _ROWS, SAME),)),
    **dict.fromkeys(_RESIZED.split(), (Rule(_first_axis, _ROWS, Form.EQUAL),)),
    "MaxPoolV2": (Rule(_first_axis, _ROWS, Form.EQUAL, Form.EQUAL),),
    **dict.fromkeys(
        _BACKWARDS.split(),
        (Rule(_of_sizes, Form.SHAPE, SAME, Form.ROWS),),
    ),
    **dict.fromkeys(_OF_OUTPUTS.split(), (Rule(_first_axis, *[_ROWS] * 3),)),
    **dict.fromkeys(
        ("AvgPoolGrad", "AvgPool3DGrad"),
        (Rule(_of_sizes, Form.SHAPE, Form.ROWS),),
    ),
    **dict.fromkeys(
        ("ResizeBicubicGrad", "ResizeBilinearGrad"),
        (Rule(_first_axis, _ROWS, _ROWS),),
    ),
    "ResizeNearestNeighborGrad": (Rule(_first_axis, _ROWS, Form.EQUAL),),
    "Dilation2DBackpropInput": (Rule(_first_axis, _ROWS, Form.EQUAL, _ROWS),),
    "DrawBoundingBoxesV2": (Rule(_first_axis, _ROWS, _ROWS, Form.EQUAL),),
    "Fingerprint": (Rule(_first_axis, _ROWS, Form.EQUAL),),
    "Cross": (Rule(_crossed, _ROWS, _ROWS),),
    **dict.fromkeys(
        ("LowerBound", "UpperBound"),
        (
            Rule(_searched, Form.EQUAL, _ROWS),
            Rule(_first_axis, _ROWS, _ROWS),
        ),
    ),
    "ImageProjectiveTransformV3": (
        Rule(_first_axis, _ROWS, _ROWS, Form.EQUAL, SAME),
    ),
    **dict.fromkeys(_MATRICES.split(), (Rule(_of_matrices, _ROWS),)),
    **dict.fromkeys(
        ("MatrixSolve", "MatrixTriangularSolve"),
        (Rule(_of_matrices, _ROWS, _ROWS),),
    ),
    "MatrixBandPart": (Rule(_last_axes, _ROWS, Form.EQUAL, Form.EQUAL),),
    "MatrixDiagPart": (Rule(_last_axes, _ROWS),),
    **dict.fromkeys(
        ("MatrixDiagPartV2", "MatrixDiagPartV3"),
        (Rule(_last_axes, _ROWS, Form.EQUAL, Form.EQUAL),),
    ),
    "MatrixDiag": (Rule(_of_vectors, _ROWS),),
    **dict.fromkeys(
        ("MatrixDiagV2", "MatrixDiagV3"),
        (Rule(_of_vectors, _ROWS, *[Form.EQUAL] * 4),),
    ),
    "MatrixSetDiag": (Rule(_diagonals, _ROWS, _ROWS),),
    **dict.fromkeys(
        ("MatrixSetDiagV2", "MatrixSetDiagV3"),
        (Rule(_diagonals, _ROWS, _ROWS, Form.EQUAL),),
    ),
    "OneHot": (Rule(_one_hot, _ROWS, Form.EQUAL, SAME, SAME),),
    "SparseSoftmaxCrossEntropyWithLogits": (Rule(_losses, _ROWS, _ROWS),),
    "SoftmaxCrossEntropyWithLogits": (Rule(_losses, _ROWS, _ROWS),),
    "InTopKV2": (Rule(_losses, _ROWS, _ROWS, Form.EQUAL),),
    **dict.fromkeys(
        ("RGBToHSV", "HSVToRGB", "FFT2D", "IFFT2D", "FFT3D", "IFFT3D"),
        (Rule(_last_axes, _ROWS),),
    ),
    **dict.fromkeys(
        (
            "AdjustContrastv2",
            "AdjustHue",
            "AdjustSaturation",
            "RFFT2D",
            "IRFFT2D",
            "RFFT3D",
            "IRFFT3D",
        ),
        (Rule(_last_axes, _ROWS, Form.EQUAL),),
    ),
    "FakeQuantWithMinMaxVarsPerChannel": (
        Rule(_of_vectors, _ROWS, Form.EQUAL, Form.EQUAL),
    ),
}
