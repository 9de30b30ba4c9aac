"""Mutants of rules that no number can refute, as they are right as well."""

_ONE_NUMBER = "all values are one number, in whatever order they are"
_SAME_SIGN = "a quotient by a number of samples has the sign of its rows"
_SAME_HOLES = "a quotient by a number of samples has the holes of its rows"
_MIXED_ONES = (
    "rule 0, output 0: ROWS ONE mixed, not mixed",
    "rule 0, output 0: ROWS SAME mixed, not mixed",
    "rule 0, output 0: ROWS SAME joined, one block",
    "rule 1, output 0: ROWS ONE mixed, not mixed",
)
_ZEROS = tuple(
    f"rule 0, output 0: ROWS {entries}, divided"
    for entries in ("ONE", "SAME", "VARYING")
)
_QUOTIENT = "rule 1, output 0: ROWS ONE mixed, not mixed"
CLAIMS = {
    "OnesLike": dict.fromkeys(_MIXED_ONES, _ONE_NUMBER),
    "ZerosLike": dict.fromkeys((*_MIXED_ONES, *_ZEROS), _ONE_NUMBER),
    "Empty": dict.fromkeys(_ZEROS[1:], _ONE_NUMBER),
    **{name: {_QUOTIENT: _SAME_SIGN} for name in ("Sign", "Angle")},
    **{
        name: {_QUOTIENT: _SAME_HOLES}
        for name in ("IsFinite", "IsInf", "IsNan")
    },
}
"""By type, the claims, and why they hold."""

_DRAWN = "what is made of a draw is taken for what one device draws"
_LINEAR = "a number that adds up still does, or only a shape is claimed"
_QUOTIENT = "rows divided by a number of samples stay so, or give as many rows"
_SIZES = "a shape is a statistic, of which only a shape, or no more, is claimed"
_SHAPE_ALONE = "only a shape is claimed, or what no value there can change"
_NO_CALL = "TensorFlow ends the process, or has no kernel, for such values"
_NOT_TOLD = "the cases of the operation do not tell it yet"

_RIGHT = (
    (
        _DRAWN,
        "AdjustContrastv2 AdjustHue AdjustSaturation "
        "ImageProjectiveTransformV3 NthElement ResourceGather "
        "ResourceGatherNd",
        "0.1 RANDOM",
    ),
    (
        _DRAWN,
        "TensorListGetItem TensorListSetItem",
        "0.1 RANDOM",
    ),
    (
        _DRAWN,
        "FusedBatchNormV2",
        "0.1 RANDOM, 0.2 RANDOM, 0.3 RANDOM, 0.4 RANDOM",
    ),
    (
        _DRAWN,
        "Reshape Roll",
        "0.1 RANDOM, 1.1 RANDOM",
    ),
    (
        _DRAWN,
        "SplitV",
        "0.1 RANDOM, 1.1 RANDOM, 1.2 RANDOM",
    ),
    (
        _DRAWN,
        "PadV2",
        "0.2 RANDOM",
    ),
    (
        _DRAWN,
        "MatrixDiagV3",
        "0.4 RANDOM",
    ),
    (
        _DRAWN,
        "ConcatV2",
        "1.0 RANDOM, 1.1 RANDOM",
    ),
    (
        _DRAWN,
        "Cumsum ReverseV2",
        "1.1 RANDOM",
    ),
    (
        _DRAWN,
        "StridedSlice",
        "2.2 RANDOM",
    ),
    (
        _LINEAR,
        "ArgMax EuclideanNorm Max SoftmaxCrossEntropyWithLogits",
        "0.0 COUNT",
    ),
    (
        _NOT_TOLD,
        "Min",
        "0.0 COUNT",
    ),
    (
        _LINEAR,
        "Roll",
        "0.0 COUNT, 0.0 TOTAL, 0.0 COUNTED, 0.0 MEAN, 1.1 COUNT, 1.1 TOTAL, "
        "1.1 COUNTED",
    ),
    (
        _LINEAR,
        "Cumsum ReverseV2",
        "0.0 COUNT, 0.0 TOTAL, 0.0 COUNTED, 0.0 MEAN, 1.1 TOTAL, 1.1 COUNTED",
    ),
    (
        _NOT_TOLD,
        "PadV2",
        "0.0 MEAN",
    ),
    (
        _NOT_TOLD,
        "TensorListLength TensorListStack",
        "0.0 TOTAL, 0.0 MEAN",
    ),
    (
        _LINEAR,
        "BroadcastTo",
        "0.1 COUNT",
    ),
    (
        _NOT_TOLD,
        "StatelessRandomNormal TensorListPopBack",
        "0.1 COUNT, 0.1 TOTAL, 0.1 COUNTED",
    ),
    (
        _NOT_TOLD,
        "StatelessRandomGammaV3",
        "0.1 TOTAL",
    ),
    (
        _NOT_TOLD,
        "Sum",
        "1.0 COUNT",
    ),
    (
        _NOT_TOLD,
        "Split",
        "1.0 TOTAL",
    ),
    (
        _LINEAR,
        "ConcatV2",
        "1.1 TOTAL, 1.1 COUNTED",
    ),
    (
        _LINEAR,
        "StridedSlice Unpack",
        "1.0 COUNT",
    ),
    (
        _NOT_TOLD,
        "StridedSlice",
        "2.1 COUNT, 2.2 COUNT, 2.2 TOTAL, 2.2 COUNTED",
    ),
    (
        _LINEAR,
        "BatchMatMul BatchMatMulV3 MatMul",
        "2.0 COUNT, 3.1 COUNT, 4.1 COUNT, 5.0 COUNT",
    ),
    (
        _NO_CALL,
        "Range",
        "0.1 MEAN",
    ),
    (
        _NO_CALL,
        "IRFFT RFFT",
        "0.1 ROWS, 0.1 JOINED",
    ),
    (
        _NO_CALL,
        "ConcatV2",
        "1.0 DIVIDED, 1.0 MEAN",
    ),
    (
        _NO_CALL,
        "Unpack",
        "2.0 DIVIDED",
    ),
    (
        _NO_CALL,
        "Mul",
        "3.1 SHAPE, 4.0 SHAPE",
    ),
    (
        _NOT_TOLD,
        "RandomShuffle",
        "0.0 COUNT, 0.0 SHAPE, 0.0 TOTAL, 0.0 COUNTED, 0.0 MEAN",
    ),
    (
        _NOT_TOLD,
        "RngReadAndSkip",
        "0.0 COUNT, 0.0 TOTAL, 0.0 COUNTED, 0.0 DERIVED, 0.0 OPAQUE",
    ),
    (
        _NOT_TOLD,
        "Multinomial",
        "0.0 JOINED, 0.0 DIVIDED, 0.0 PLACES, 1.0 COUNT, 1.0 TOTAL, 1.0 "
        "COUNTED, 1.0 MEAN",
    ),
    (
        _QUOTIENT,
        "AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D "
        "BroadcastTo Conv2D Cumsum DepthToSpace EuclideanNorm "
        "ExtractImagePatches FFT3D HSVToRGB IFFT2D IRFFT LogMatrixDeterminant "
        "MatrixDeterminant MatrixLogarithm Max MaxPool NthElement "
        "Pack Qr RFFT RGBToHSV ResizeArea "
        "ResizeBicubic ResizeBilinear ResizeNearestNeighbor ReverseV2 Roll "
        "SelfAdjointEigV2 SpaceToDepth SparseSoftmaxCrossEntropyWithLogits "
        "Svd TopKV2",
        "0.0 DIVIDED",
    ),
    (
        _QUOTIENT,
        "MatrixDiagV3 Min TensorListFromTensor TensorListLength "
        "TensorListStack",
        "0.0 DIVIDED",
    ),
    (
        _QUOTIENT,
        "ImageProjectiveTransformV3 SoftmaxCrossEntropyWithLogits",
        "0.0 DIVIDED, 0.1 DIVIDED",
    ),
    (
        _QUOTIENT,
        "MaxPool3DGrad",
        "0.0 DIVIDED, 0.1 DIVIDED, 0.2 DIVIDED",
    ),
    (
        _QUOTIENT,
        "StatelessRandomGammaV3",
        "0.1 DIVIDED",
    ),
    (
        _QUOTIENT,
        "Conv2DBackpropInput Conv3DBackpropInputV2 "
        "DepthwiseConv2dNativeBackpropInput",
        "0.2 DIVIDED",
    ),
    (
        _QUOTIENT,
        "Select",
        "1.0 DIVIDED",
    ),
    (
        _NOT_TOLD,
        "TensorListLength TensorListStack",
        "0.0 JOINED",
    ),
    (
        _NOT_TOLD,
        "TensorListFromTensor",
        "0.0 JOINED, 0.0 PLACES",
    ),
    (
        _NOT_TOLD,
        "Min Slice Transpose",
        "0.0 PLACES",
    ),
    (
        _NOT_TOLD,
        "GatherNd",
        "0.0 PLACES",
    ),
    (
        _NOT_TOLD,
        "TensorListPopBack TensorListSetItem",
        "0.1 DERIVED",
    ),
    (
        _NOT_TOLD,
        "TensorListGetItem",
        "0.1 DERIVED, 0.1 OPAQUE",
    ),
    (
        _SHAPE_ALONE,
        "ImageProjectiveTransformV3",
        "0.1 EQUAL",
    ),
    (
        _SHAPE_ALONE,
        "Cumsum ReverseV2 Roll",
        "1.1 DERIVED",
    ),
    (
        _SHAPE_ALONE,
        "ConcatV2",
        "1.1 DERIVED, 1.1 OPAQUE",
    ),
    (
        _NOT_TOLD,
        "StridedSlice",
        "2.2 DERIVED, 2.2 OPAQUE",
    ),
    (
        _SIZES,
        "Shape ShapeN Size",
        "0.0 SHAPE",
    ),
    (
        _NOT_TOLD,
        "Squeeze",
        "0.0 SHAPE, 1.0 SHAPE",
    ),
    (
        _SIZES,
        "Tile",
        "0.0 SHAPE, 3.0 SHAPE",
    ),
    (
        _NOT_TOLD,
        "Split",
        "0.1 SHAPE",
    ),
    (
        _NOT_TOLD,
        "StridedSlice",
        "0.1 SHAPE, 0.2 SHAPE, 2.1 SHAPE, 2.2 SHAPE, 2.3 SHAPE",
    ),
    (
        _SIZES,
        "BroadcastTo",
        "2.0 SHAPE",
    ),
    (
        _SIZES,
        "Mul",
        "1.0 SHAPE, 2.1 SHAPE, 5.0 SHAPE",
    ),
    (
        _SIZES,
        "Roll",
        "1.1 SHAPE",
    ),
    (
        _SIZES,
        "Add AddV2 Sub",
        "4.0 SHAPE",
    ),
)
"""Reasons, types, and where their rules may accept more: "2.1 MEAN" is a mean
as the input at 1 of the rule at 2."""
WIDER: dict[str, dict[str, str]] = {}
"""By type, rules that accept one form more, and why they are not refuted."""
for _reason, _names, _mutants in _RIGHT:
    for _name in _names.split():
        _of_type = WIDER.setdefault(_name, {})
        _of_type |= dict.fromkeys(_mutants.split(", "), _reason)

_NOT_YET = (
    "AvgPool3DGrad AvgPoolGrad BatchMatMulV2 BiasAdd BiasAddGrad Bitcast "
    "BroadcastArgs Cast Cholesky ConcatV2 ConjugateTranspose "
    "Conv2DBackpropFilter Conv3D Conv3DBackpropFilterV2 Cross Cumprod "
    "Cumsum CumulativeLogsumexp DebugIdentityV3 "
    "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter Dilation2D "
    "Dilation2DBackpropFilter Dilation2DBackpropInput DrawBoundingBoxesV2 "
    "DynamicStitch Eig EnsureShape ExpandDims ExtractVolumePatches "
    "FakeQuantWithMinMaxVarsPerChannel FFT2D Fingerprint FusedBatchNorm "
    "FusedBatchNormV3 GatherV2 HistogramFixedWidth IdentityN IFFT IFFT3D "
    "InTopKV2 IRFFT2D IRFFT3D LogSoftmax LookupTableFindV2 LRN "
    "LRNGrad Lu MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 "
    "MatrixDiagPartV3 MatrixDiagV2 MatrixInverse "
    "MatrixSetDiagV3 MatrixSquareRoot MaxPool3D MaxPoolGrad Mean MirrorPad "
    "MirrorPadGrad MulNoNan Neg OneHot Pad ParallelDynamicStitch "
    "ParameterizedTruncatedNormal Prod "
    "RaggedTensorToTensor RandomGamma "
    "RandomPoissonV2 RandomStandardNormal RandomUniformInt Rank RealDiv "
    "Reshape ResizeBicubicGrad ResizeBilinearGrad "
    "ResizeNearestNeighborGrad ReverseV2 RFFT2D RFFT3D Roll Slice Split "
    "SplitV StatefulRandomBinomial StatelessMultinomial "
    "StatelessParameterizedTruncatedNormal StatelessRandomBinomial "
    "StatelessRandomGammaV2 StatelessRandomNormalV2 StatelessRandomPoisson "
    "StatelessRandomUniform StatelessRandomUniformFullInt "
    "StatelessRandomUniformFullIntV2 StatelessRandomUniformInt "
    "StatelessRandomUniformIntV2 StatelessRandomUniformV2 "
    "StatelessTruncatedNormal StatelessTruncatedNormalV2 StridedSliceGrad "
    "StringSplitV2 TruncatedNormal Where"
)
NOT_WALKED = _NOT_YET.split()
"""Types whose wider rules have not all been decided: each may be right, or the
cases too weak to refute it. What the rules accept today is proven."""
