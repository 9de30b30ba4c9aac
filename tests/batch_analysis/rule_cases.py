"""Small calls of each type of operation that a rule says something of."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import tensorflow as tf
from rule_operands import FEW
from rule_operands import FORMS
from rule_operands import LENGTHS
from rule_operands import ROW_FORMS
from rule_operands import SHAPES
from rule_operands import STATISTICS

from keras_conflux._batch_analysis.elementwise import ENTRY_BY_ENTRY
from keras_conflux._batch_analysis.rules import RULES

N = None


@dataclasses.dataclass(frozen=True)
class V:
    """An input that may be of any of some forms."""

    domain: str
    shape: tuple = ()
    forms: tuple = FORMS


class K:
    """An input that is a constant.

    Args:
        value: It.
        dtype: Its type, in words.
        without: Forms that it cannot be of, as TensorFlow ends the process.
    """

    def __init__(self, value, dtype="int32", without=()):
        self.without = without
        self.value = np.asarray(value, object if dtype == "string" else dtype)
        self.forms = ("constant",)


class L(tuple):
    """An input that is a list."""

    def __new__(cls, *slots):
        return super().__new__(cls, slots)


@dataclasses.dataclass
class Case:
    """A call of an operation.

    Args:
        slots: For each input, what it may be.
        attributes: Of the operation.
        is_aligned: Whether all rows are as many.
    """

    slots: tuple
    attributes: dict[str, Any]
    is_aligned: bool = False

    def choices(self):
        """Yields a form for each input."""
        flat = flatten(self.slots)
        for forms in itertools.product(*(slot.forms for slot in flat)):
            if not self.is_aligned or are_aligned(forms):
                yield forms


def flatten(slots):
    return [
        each
        for slot in slots
        for each in (slot if isinstance(slot, L) else [slot])
    ]


def are_aligned(forms):
    """Whether rows of these forms are as many."""
    lengths = {
        LENGTHS.get(form, "one")
        for form in forms
        if form in (*ROW_FORMS, *SHAPES, "positions")
    }
    return len(lengths) < 2


def case(*slots, aligned=False, **attributes):
    return Case(slots, attributes, aligned)


def S(*shape):
    """Returns an input that is a shape with a number of samples."""
    return V("real", shape, SHAPES)


def shape_of(rank, axis):
    sizes = [(2, 3, 2, 3)[i] for i in range(rank)]
    sizes[axis] = N
    return tuple(sizes)


ALL_SHAPES = [shape_of(rank, i) for rank in (1, 2, 3, 4) for i in range(rank)]
SOME_SHAPES = [(N,), (N, 3), (2, N), (2, N, 2)]
SMALL = (*FEW, "derived", "mean", "random")


def rowwise(domain, shapes=SOME_SHAPES, forms=FORMS):
    return [V(domain, shape, forms) for shape in shapes]


def alone(domain, shapes=ALL_SHAPES, **attributes):
    return [case(x, **attributes) for x in rowwise(domain, shapes)]


def alike(domains, shapes=((N, 3), (2, N)), forms=FEW, **attributes):
    """Calls with inputs of one shape, and with scalars beside them."""
    found = []
    for shape in shapes:
        slots = [V(domain, shape, forms) for domain in domains]
        found.append(case(*slots, aligned=True, **attributes))
    first, *others = domains
    scalars = [V(domain, (), STATISTICS) for domain in others]
    found.append(
        case(V(first, (N, 3), FEW), *scalars, aligned=True, **attributes)
    )
    return found


def central(domain, shapes=SOME_SHAPES, **attributes):
    """Calls with two inputs of all forms, of all ranks and axes."""
    found = []
    for shape in shapes:
        forms = FORMS if shape == (N, 3) else FEW
        for one, other in itertools.product((shape, ()), repeat=2):
            slots = V(domain, one, forms), V(domain, other, forms)
            found.append(case(*slots, aligned=True, **attributes))
        if len(shape) > 1:
            slots = V(domain, shape, FEW), V(domain, shape[1:], FEW)
            found.append(case(*slots, aligned=True, **attributes))
    return found


CASES: dict[str, list[Case]] = {}


def of(names, cases):
    for name in names.split():
        CASES.setdefault(name, []).extend(cases)


# Entry by entry.

_LARGE = "Acosh"
_OF_INTEGERS = "BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift"
_ARGUMENTS = {
    **dict.fromkeys(_OF_INTEGERS.split(), "bits"),
    "PopulationCount": "bits",
    **dict.fromkeys(["Mod", "TruncateMod", "FloorMod", "TruncateDiv"], "large"),
    **dict.fromkeys(["LogicalAnd", "LogicalNot", "LogicalOr"], "bool"),
    **dict.fromkeys(["Angle", "ComplexAbs", "Conj", "Imag", "Real"], "complex"),
    **dict.fromkeys(["Greater", "Less"], "real"),
    **dict.fromkeys(
        ["Floor", "Ceil", "Round", "Rint", "Sign", "FloorDiv"], "real"
    ),
    **dict.fromkeys(["Zeta", "Acosh"], "large"),
    **dict.fromkeys(["IsNan", "IsInf", "IsFinite"], "holes"),
    "Equal": "int",
    "NotEqual": "int",
    "UnicodeScript": "letter",
}
_ATTRIBUTES = {
    "ApproximateEqual": {"tolerance": 0.2},
    "Bucketize": {"boundaries": [0.2, 0.4, 0.7]},
    "StringToHashBucketStrong": {"num_buckets": 9, "key": [1, 2]},
    "StringToHashBucket": {"num_buckets": 9},
    "StringToHashBucketFast": {"num_buckets": 9},
    "StaticRegexFullMatch": {"pattern": "[a-z]"},
    "StaticRegexReplace": {"pattern": "[a-z]", "rewrite": "Q"},
    "UnicodeTranscode": {
        "input_encoding": "UTF-8",
        "output_encoding": "UTF-16-BE",
    },
    **{
        key: {"Tout": "float64"}
        for key in ("Angle", "ComplexAbs", "Imag", "Real")
    },
    "Complex": {"Tout": "complex128"},
}
_STRINGS = (
    "StringLower StringUpper StringLength StringStrip StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StaticRegexFullMatch "
    "StaticRegexReplace UnicodeTranscode EncodeBase64"
)
_TWO = (
    "ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex EluGrad "
    "Equal FloorDiv FloorMod Greater GreaterEqual Igamma IgammaGradA Igammac "
    "InvGrad RandomGammaGrad "
    "LeakyReluGrad LeftShift Less LessEqual LogicalAnd LogicalOr Maximum "
    "Minimum Mod NextAfter NotEqual Polygamma Pow ReciprocalGrad Relu6Grad "
    "ReluGrad RightShift RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad "
    "SoftsignGrad SqrtGrad SquaredDifference TanhGrad TruncateDiv TruncateMod "
    "Xdivy Xlog1py Xlogy Zeta"
)
ENTRY_BY_ENTRY_TYPES = [
    name
    for name, rules in RULES.items()
    if rules in (ENTRY_BY_ENTRY, ENTRY_BY_ENTRY[:1])
]
_OF_ONE_SHAPE = (
    "ApproximateEqual EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad "
    "ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad "
    "SqrtGrad TanhGrad"
)
_STATISTIC = V("unit32", (), STATISTICS)
_ELSEWHERE = (
    "Betainc ClipByValue FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars "
    "RegexFullMatch RegexReplace StringJoin StringToNumber Substr DecodeBase64 "
    "Polygamma Div"
)
for _name in ENTRY_BY_ENTRY_TYPES:
    _domain = _ARGUMENTS.get(_name, "unit")
    _given = _ATTRIBUTES.get(_name, {})
    if _name in _ELSEWHERE.split():
        continue
    if _name in _STRINGS.split():
        of(_name, alone("string", SOME_SHAPES, **_given))
    elif _name in _OF_ONE_SHAPE.split():
        _slots = [[V(_domain, x, ROW_FORMS)] * 2 for x in ((N, 3), (2, N))]
        of(_name, [case(*x, aligned=True, **_given) for x in _slots])
    elif _name in _TWO.split():
        of(_name, alike([_domain] * 2, **_given))
    else:
        of(_name, alone(_domain, SOME_SHAPES, **_given))
of("Polygamma", alike(["digit64", "large"]))
of("Betainc", alike(["large", "large", "unit"], [(N, 3)], ROW_FORMS))
of("ClipByValue", alike(["real"] * 3, [(N, 3)], ROW_FORMS))
of("FakeQuantWithMinMaxArgs", alone("unit32", SOME_SHAPES, max=0.5, min=0.1))
of(
    "FakeQuantWithMinMaxVars",
    [
        case(x, K(0.1, "float32"), _STATISTIC)
        for x in rowwise("unit32", forms=FEW)
    ],
)
_NO_COUNTS = tuple(form for form in STATISTICS if form != "count")
_WORD = V("string", (), ("equal", "derived", "random"))
of("RegexFullMatch", [case(x, _WORD) for x in rowwise("string")])
of("RegexReplace", [case(x, _WORD, _WORD) for x in rowwise("string")])
of(
    "StringJoin",
    [
        case(L(*[V("string", shape, ROW_FORMS)] * 2), aligned=True)
        for shape in SOME_SHAPES
    ]
    + [
        case(L(V("string", shape, ROW_FORMS), V("string", (), STATISTICS)))
        for shape in SOME_SHAPES
    ],
)
of("StringToNumber", alone("number", SOME_SHAPES, out_type="float64"))
of("DecodeBase64", alone("base64", SOME_SHAPES))
of(
    "Substr",
    [
        case(x, V("zero", (), _NO_COUNTS), V("int", (), STATISTICS))
        for x in rowwise("number")
    ]
    + [case(*[V("int", (N, 3), FEW)] * 0, V("number", (N, 3)), K(0), K(1))],
)
_SOME_OF_ALL = [
    *alone("real"),
    *alone("int", SOME_SHAPES),
    *[case(S(*shape)) for shape in SOME_SHAPES],
    case(V("unit", (), ("places",))),
]
of("Identity StopGradient Snapshot", _SOME_OF_ALL)
of("PreventGradient", [case(x) for x in rowwise("real")])
of("CheckNumerics", alone("real", SOME_SHAPES, message="not finite"))
of("DebugIdentityV2", alone("real", SOME_SHAPES))
of("DebugIdentityV3", alone("real", SOME_SHAPES, tensor_name="x:0"))
of(
    "EnsureShape",
    [case(x, shape=x.shape) for x in rowwise("real", forms=ROW_FORMS)],
)
of("Add AddV2 Sub Mul RealDiv", central("unit"))
of("AddV2", central("unit", ALL_SHAPES))
of("Add AddV2 Sub Mul", alike(["int"] * 2, forms=(*FEW, "count")))
for _one, _other in (((2,), (2,)), ((2,), (3, 2)), ((N, 3), (1,))):
    _pair = [V("int", x, FEW if N in x else STATISTICS) for x in (_one, _other)]
    of("Add AddV2 Sub Mul", [case(*_pair), case(*_pair[::-1])])
of("AddV2 Mul", alike(["int"] * 2, [()], STATISTICS))
of("AddV2 Mul RealDiv", alike(["complex"] * 2, forms=SMALL))
of("MulNoNan DivNoNan", alike(["real"] * 2, [(N, 3), ()], FORMS))
of(
    "AddN",
    [
        case(L(*[V(domain, shape, ROW_FORMS)] * 2), aligned=True)
        for domain in ("real", "int")
        for shape in SOME_SHAPES
    ]
    + [case(L(*[V(domain, (), STATISTICS)] * 2)) for domain in ("real", "int")],
)
of("Neg", [*alone("real"), *alone("int"), *alone("complex", SOME_SHAPES)])
of(
    "IdentityN",
    [case(L(V("real", shape, FEW), V("int", shape))) for shape in SOME_SHAPES],
)
for _from, _to in (
    *(("real", "float32"), ("real", "int32"), ("real", "bool")),
    *(("int", "float64"), ("int", "int64"), ("int", "bool")),
    *(("bool", "float64"), ("complex", "float64"), ("real", "complex128")),
):
    of("Cast", alone(_from, SOME_SHAPES, DstT=_to))
of("Bitcast", alone("int", SOME_SHAPES, type="uint32"))
of("Cast", [case(V("unit", (), ("places",)), DstT="int32")])
_FLAG = ("equal", "rows", "mixed", "derived")
of(
    "SelectV2",
    [
        case(
            V("bool", flag, _FLAG),
            V("real", shape, SMALL),
            V("real", other, SMALL),
            aligned=True,
        )
        for shape in ((N, 3), (2, N), (3,))
        for flag in (shape, ())
        for other in (shape, ())
    ]
    + [
        case(V("bool", (3,), _FLAG), *values)
        for value in (V("real", (3,), STATISTICS),)
        for zero in (K(0, "float64"),)
        for values in ((value, zero), (zero, value))
    ],
)
of(
    "Select",
    [
        case(
            V("bool", flag, ("rows", "mixed", "some")),
            *[V("real", shape, ("rows", "mixed", "some"))] * 2,
            aligned=True,
        )
        for flag, shape in (
            *(((N, 3), (N, 3)), ((2, N), (2, N))),
            *(((N,), (N, 3)), ((N,), (N,))),
        )
    ]
    + [case(K(True, "bool"), *[V("real", (3,), STATISTICS)] * 2)],
)

of("Div", alike(["real"] * 2))
of("Equal NotEqual", alike(["digit64"] * 2, [(N, 3)]))

# Reductions.


def _axes_of(shape):
    return [*range(len(shape)), -1]


def reduced(domain, shapes=ALL_SHAPES, forms=FORMS):
    return [
        case(x, K([axis]), keep_dims=keep)
        for x in rowwise(domain, shapes, forms)
        for axis in _axes_of(x.shape)
        for keep in (True, False)
    ]


of("Sum Mean", [*reduced("real"), *reduced("int", SOME_SHAPES)])
of("Sum Mean", reduced("complex", SOME_SHAPES, SMALL))
of("Sum Mean", [case(V("real", (2, N, 3)), K([0, 1]), keep_dims=False)])
of("Max Min EuclideanNorm Prod", reduced("real", SOME_SHAPES))
of("Max Prod", reduced("int", SOME_SHAPES))
of("All Any", reduced("bool", SOME_SHAPES))
of("Prod", [case(S(*shape), K([0]), keep_dims=False) for shape in SOME_SHAPES])
of("ReduceJoin", reduced("string", SOME_SHAPES))
of("L2Loss", alone("real"))
_ALONG = [
    case(x, K(axis))
    for x in rowwise("real", ALL_SHAPES)
    for axis in _axes_of(x.shape)
]
of("Cumsum Cumprod CumulativeLogsumexp", _ALONG)
of(
    "ReverseV2",
    [
        case(x, K([axis]))
        for domain in ("real", "string")
        for x in rowwise(domain, SOME_SHAPES)
        for axis in range(len(x.shape))
    ],
)
of(
    "Roll",
    [
        case(x, K([1]), K([axis]))
        for x in rowwise("real", ALL_SHAPES)
        for axis in range(len(x.shape))
    ],
)
of("Softmax LogSoftmax", alone("real"))
of("FFT IFFT", alone("complex", SOME_SHAPES))
_LENGTH = K([2], without=("positions", "rows", "joined"))
_LENGTHS = K([2, 2], without=("positions", "rows", "joined"))
of("RFFT", [case(x, _LENGTH, Tcomplex="complex128") for x in rowwise("real")])
of("IRFFT", [case(x, _LENGTH, Treal="float64") for x in rowwise("complex")])
of("NthElement", [case(x, K(1)) for x in rowwise("real", SOME_SHAPES[1:])])
of("TopKV2", [case(x, K(1)) for x in rowwise("real")])
of(
    "TopKV2",
    [
        case(x, V("digit", (), ("count",)))
        for x in rowwise("real", forms=("pairs", "mixed pairs", "joined"))
    ],
)
of(
    "ArgMax ArgMin",
    [case(x, K(axis)) for x in rowwise("real") for axis in _axes_of(x.shape)],
)
for _format, _shape in (("NHWC", (N, 2, 2, 3)), ("NCHW", (N, 3, 2, 2))):
    of(
        "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
        [
            case(
                V("real32", _shape, ROW_FORMS),
                *[V("unit32", (3,), ("equal", "total"))] * 4,
                data_format=_format,
                is_training=trains,
            )
            for trains in (False, True)
        ],
    )
    of(
        "BiasAdd",
        [
            case(
                V("real", _shape),
                V("real", (3,), STATISTICS),
                data_format=_format,
            )
        ],
    )
of(
    "FusedBatchNorm",
    [
        case(
            V("real32", (2, N, 2, 3), FEW),
            *[V("unit32", (3,), ("equal",))] * 4,
            is_training=False,
        )
    ],
)
_BIASES = [
    case(V("real", shape), V("real", (3,), STATISTICS))
    for shape in ((N, 3), (N, 2, 3), (2, N, 3))
]
of("BiasAdd", _BIASES)
of("BiasAddGrad", [case(each.slots[0]) for each in _BIASES])
of("BiasAddGrad", [case(V("real", (N, 3, 2, 2)), data_format="NCHW")])

# Shapes.

_PLACES = V("unit", (), ("places",))
of("Shape Size", [*alone("real"), case(_PLACES)])
of("ShapeN", [case(L(V("real", s, FEW), V("real", s))) for s in SOME_SHAPES])
_NUMBER = V("real", (), STATISTICS)
of("Fill", [case(S(*shape), _NUMBER) for shape in ALL_SHAPES])
_ZEROS = {"dtype": tf.float32, "init": True}
of("Empty", [case(S(*shape), **_ZEROS) for shape in ALL_SHAPES])
of(
    "BroadcastTo",
    [
        case(V("real", value, SMALL), S(*shape), aligned=True)
        for shape in ALL_SHAPES
        for value in {shape, (), shape[1:]}
    ],
)
of("BroadcastTo", [case(_NUMBER, K([2, 3])), case(_NUMBER, K([]))])
of("Rank", [*alone("real", SOME_SHAPES), case(_PLACES)])
_END = V("digit", (), ("count", "total", "derived"))
of("Range", [case(K(0), _END, K(1)), case(K(1), _END, K(1))])
of("Range", [case(K(0), _END, K(2))])
_REAL_END = V("unit", (), ("count", "total"))
of("Range", [case(K(0, "float64"), _REAL_END, K(1, "float64"))])

# Parts.


def sliced(domain, shape, begin, end, step, **masks):
    return case(V(domain, shape), K(begin), K(end), K(step), **masks)


for _shape in ((N, 3), (2, N), (N, 2, 3), (2, N, 3)):
    _rank = len(_shape)
    _zero, _one = [0] * _rank, [1] * _rank
    _all = (1 << _rank) - 1
    for _axis in range(_rank):
        _bit = 1 << _axis
        _whole = {"begin_mask": _all & ~_bit, "end_mask": _all & ~_bit}
        _back = [-1 if i == _axis else 1 for i in range(_rank)]
        of(
            "StridedSlice",
            [
                sliced("real", _shape, _zero, _one, _one, **_whole),
                sliced(
                    "real",
                    _shape,
                    _one,
                    _zero,
                    _one,
                    begin_mask=_all & ~_bit,
                    end_mask=_all,
                ),
                sliced(
                    "real",
                    _shape,
                    _zero,
                    _zero,
                    _back,
                    begin_mask=_all,
                    end_mask=_all,
                ),
                sliced(
                    "real",
                    _shape,
                    _zero,
                    _one,
                    _one,
                    shrink_axis_mask=_bit,
                    **_whole,
                ),
                sliced(
                    "real",
                    _shape,
                    _zero,
                    _one,
                    _one,
                    new_axis_mask=_bit,
                    begin_mask=_all,
                    end_mask=_all,
                ),
                sliced(
                    "real",
                    _shape,
                    _zero,
                    _one,
                    _one,
                    ellipsis_mask=_bit,
                    begin_mask=_all,
                    end_mask=_all,
                ),
            ],
        )
        _size = [-1] * _rank
        _size[_axis] = 1
        of(
            "Slice",
            [
                case(V("real", _shape), K(_zero), K([-1] * _rank)),
                case(V("real", _shape), K(_zero), K(_size)),
            ],
        )
        of(
            "Slice",
            [
                case(
                    V("real", _shape), K(begin), S(*tuple(sizes)), aligned=True
                )
                for begin, sizes in (
                    (_zero, _shape),
                    (
                        [int(i == _axis) for i in range(_rank)],
                        [
                            n - 1 if n and i == _axis else n
                            for i, n in enumerate(_shape)
                        ],
                    ),
                )
            ],
        )
        _given = S(*_shape), K(_zero), K(_zero)
        for _step, _masks, _taken in (
            (_one, {}, _shape),
            (_back, {}, _shape),
            (_one, {"new_axis_mask": _bit}, None),
            (_one, {"shrink_axis_mask": _bit}, None),
        ):
            _rows = list(_shape)
            if "new_axis_mask" in _masks:
                _rows.insert(_axis, 1)
            elif _masks:
                del _rows[_axis]
            if N in _rows:
                of(
                    "StridedSliceGrad",
                    [
                        case(
                            *_given,
                            K(_step),
                            V("real", tuple(_rows)),
                            aligned=True,
                            begin_mask=_all,
                            end_mask=_all,
                            **_masks,
                        )
                    ],
                )
of(
    "StridedSliceGrad",
    [case(K([4]), K([1]), K([3]), K([1]), V("real", (2,), _NO_COUNTS))],
)
of(
    "Slice",
    [
        case(S(*shape), K([begin]), K([size]))
        for shape in ((N, 3), (2, N), (2, N, 3))
        for begin, size in ((0, 1), (1, 1), (0, -1), (1, -1), (0, 2))
    ],
)
for _begin, _end, _step, _masks in (
    (0, 1, 1, {"shrink_axis_mask": 1}),
    (1, 2, 1, {"shrink_axis_mask": 1}),
    (-1, 0, 1, {"shrink_axis_mask": 1}),
    (1, 0, 1, {"end_mask": 1}),
    (0, -1, 1, {"begin_mask": 1}),
    (0, 0, -1, {"begin_mask": 1, "end_mask": 1}),
    (0, 0, 1, {"end_mask": 1, "begin_mask": 1, "new_axis_mask": 1}),
):
    of(
        "StridedSlice",
        [
            case(S(*shape), K([_begin]), K([_end]), K([_step]), **_masks)
            for shape in ((N, 3), (2, N), (2, N, 3))
        ],
    )
of(
    "Unpack",
    [
        case(V("real", shape), axis=axis, num=shape[axis])
        for shape in ALL_SHAPES
        for axis in range(len(shape))
        if shape[axis]
    ]
    + [case(S(*shape), axis=0, num=len(shape)) for shape in SOME_SHAPES],
)
of(
    "Split",
    [
        case(K(axis), V("real", shape), num_split=parts)
        for shape in ((N, 2), (2, N), (2, N, 2))
        for axis in range(len(shape))
        for parts in (2, 1)
    ],
)
of(
    "Split",
    [case(K(0), S(*shape), num_split=2) for shape in ((N, 3), (2, N))],
)
of(
    "SplitV",
    [
        case(S(*shape), K([1, size]), K(0), num_split=2)
        for shape, size in (((N, 3), 1), ((2, N), -1), ((2, N, 3), 2))
    ],
)
_BOTH_ROWS = L(*[V("real", (N, 2), ("rows", "mixed"))] * 2)
of(
    "SplitV",
    [
        case(V("real", shape), K([1, size - 1]), K(axis), num_split=2)
        for shape in ((N, 2), (2, N), (3, N, 2))
        for axis, size in enumerate(shape)
        if size
    ],
)
_TABLE = V("real", (4, 3), STATISTICS)
_INDEX = [V("int", shape) for shape in ((N,), (N, 2), (2, N))]
of("GatherV2", [case(_TABLE, x, K(axis)) for x in _INDEX for axis in (0, 1)])
of(
    "GatherV2",
    [
        case(V("real", shape), K(index), K(axis))
        for shape in ((N, 3), (2, N), (2, N, 3))
        for axis in range(len(shape))
        for index in (0, [0])
    ]
    + [
        case(V("real", (3, N), ROW_FORMS), K([[0, 1], [1, 0]]), K(0)),
        case(V("real", (2, 3), STATISTICS), K([[0, 1], [1, 0]]), K(1)),
        case(V("real", (N, 3)), V("zero", (N,), FEW), K(0), aligned=True),
    ],
)
of(
    "GatherV2",
    [
        case(
            V("real", (N, 3), SMALL),
            V("int", shape, FORMS),
            K(axis),
            batch_dims=batch,
            aligned=True,
        )
        for shape in ((N, 2), (N,))
        for axis, batch in ((1, 1), (1, 0))
    ]
    + [
        case(
            V("real", (2, N, 3), FEW),
            V("int", (2, N, 2), FEW),
            K(2),
            batch_dims=2,
            aligned=True,
        ),
        case(V("real", (3, 4), SMALL), V("int", (N,), FEW), K(0)),
    ],
)
of(
    "GatherV2",
    [
        case(V("real", shape, ROW_FORMS), V("unit", (), ("places",)), K(axis))
        for shape in ((N, 3), (2, N))
        for axis in (0, 1)
    ],
)
of(
    "GatherV2",
    [
        case(S(*shape), K(index), K(0))
        for shape in ((N, 3), (2, N), (2, N, 3))
        for index in (0, 1, [1, 0], [0], [1])
    ],
)
of(
    "GatherNd",
    [case(_TABLE, V("int", (N, depth))) for depth in (1, 2)]
    + [
        case(_TABLE, V("int", (N, 2, 1), FEW)),
        case(V("real", (4, 3), STATISTICS), V("int", (2, N), FEW)),
        case(V("real", (N, 3)), V("unit", (), ("places",))),
        case(V("real", (2, N)), V("unit", (), ("places",))),
        case(V("real", (N, 3), ("rows", "mixed")), V("zero", (N, 1), FEW)),
    ],
)
of(
    "XlaDynamicUpdateSlice",
    [
        case(V("real", whole), V("real", part), K(begin), aligned=True)
        for whole, part, begin in (
            ((N, 3), (N, 1), [0, 1]),
            ((N, 3), (N, 1), [1, 1]),
            ((2, N, 3), (1, N, 2), [1, 0, 1]),
            ((2, N, 3), (1, N, 2), [0, 1, 0]),
        )
    ],
)
for _domain in ("bool", "int", "real"):
    of("Where", alone(_domain, SOME_SHAPES))

# Joins and moves.

_COUNTS = ("equal", "count", "total", "mean", "counted")
of(
    "Pack",
    [
        case(L(*[V("real", shape, SMALL)] * 2), axis=axis, aligned=True)
        for shape in SOME_SHAPES
        for axis in range(-1, len(shape) + 1)
    ]
    + [
        case(L(*[V("real", (), STATISTICS)] * 2), axis=0),
        case(L(*[V("int", (), _COUNTS)] * 3), axis=0),
        case(L(V("real", ()), V("real", ())), axis=0),
        case(L(*[V("real", (3,), STATISTICS)] * 2), axis=1),
    ],
)
of(
    "ConcatV2",
    [
        case(
            L(*[V("real", shape, (*SMALL, "pairs"))] * 2),
            K(axis),
            aligned=axis != shape.index(N),
        )
        for shape in SOME_SHAPES
        for axis in range(len(shape))
    ]
    + [
        case(L(*[V("real", (3,), STATISTICS)] * 2), K(0)),
        case(L(*[V("real", (N, 2), ("rows", "pairs"))] * 3), K(0)),
        case(L(V("real", (N, 2), ROW_FORMS)), K(0)),
        case(L(S(N, 3), K([3])), K(0)),
        case(L(K([3]), S(2, N)), K(0)),
        case(L(K([3]), V("int", (1,), ("count", "total"))), K(0)),
        case(L(V("int", (1,), ("count",)), K([3, 2])), K(0)),
        case(L(V("int", (2,), ("count",)), K([3, 2])), K(0)),
        case(L(S(2, N), S(2, N)), K(0)),
    ],
)
of(
    "DynamicStitch ParallelDynamicStitch",
    [
        case(L(K([0, 1]), K(replaced)), L(S(*shape), K([1] * len(replaced))))
        for shape in ((N, 3), (2, N))
        for replaced in ([0], [1], [0, 1])
    ]
    + [
        case(L(K([0, 1]), K([2, 3])), L(S(N, 3), S(N, 3))),
        case(L(K([1, 0])), L(S(N, 3))),
        case(L(K([[1], [0]])), L(V("real", (2, 1), ("rows", "equal")))),
    ],
)
of(
    "BroadcastArgs",
    [
        case(*slots)
        for shape in ((N, 3), (2, N))
        for other in ([], [1], [1, 1], [3, 1, 1], [2, 1], [1, 3])
        for slots in ((S(*shape), K(other)), (K(other), S(*shape)))
    ],
)
of(
    "Transpose ConjugateTranspose",
    [
        case(V("real", shape), K(order))
        for shape in ALL_SHAPES[1:6]
        for order in itertools.permutations(range(len(shape)))
    ]
    + [case(V("real", (2, 3), STATISTICS), K([1, 0]))],
)
of(
    "ExpandDims",
    [
        case(V("real", shape), K(axis))
        for shape in SOME_SHAPES
        for axis in range(-1, len(shape) + 1)
    ]
    + [case(_PLACES, K(axis)) for axis in (0, 1, 2)],
)
of(
    "Squeeze",
    [
        case(V("real", shape), axis=list(axes))
        for shape in ((N, 1), (1, N), (N, 3, 1), (1, N, 1), (3, 1, N))
        for axes in ([], [-1], [0], [1], [0, 2])
    ]
    + [case(_PLACES, axis=[1])],
)
of(
    "Reshape",
    [
        case(V("real", shape), K(target))
        for shape in ((N, 6), (2, N), (2, N, 3), (N, 2, 3), (N,))
        for target in (
            *([-1], [-1, 1], [1, -1], [-1, 2, 3], [2, -1], [-1, 3]),
            *([2, -1, 3], [1, -1, 6], [-1, 6], [6, -1], [3, -1, 2]),
        )
        if math.prod(n for n in shape if n) % math.prod(map(abs, target)) == 0
    ]
    + [
        case(V("real", shape, ROW_FORMS), S(*target), aligned=True)
        for shape, target in (
            *(((N, 6), (N, 6)), ((N, 6), (N, 2, 3)), ((2, N), (2, N))),
            *(((2, N), (N, 2)), ((N, 2), (2, N))),
        )
    ],
)
of(
    "Reshape",
    [
        case(V("real", (N,)), V("int", (1,), ("count",)), aligned=True),
        case(V("int", (1, N)), V("int", (1,), ("count",)), aligned=True),
    ],
)
of(
    "Tile",
    [
        case(V("real", shape), K(times))
        for shape, times in (
            *(((N, 3), [1, 2]), ((N, 3), [2, 1]), ((2, N), [2, 1])),
            *(((2, N), [1, 2]), ((N,), [2]), ((N,), [1])),
        )
    ]
    + [
        case(V("real", (1, 3), STATISTICS), S(N, 2)),
        case(V("real", (2, 3), STATISTICS), S(N, 2)),
        case(V("real", (1,), STATISTICS), S(N)),
    ],
)
_PADS = [
    (shape, [[1, 1] if i == axis else [0, 0] for i in range(len(shape))])
    for shape in ((N, 3), (2, N), (N, 2, 3))
    for axis in range(len(shape))
]
of("Pad", [case(V("real", shape), K(pads)) for shape, pads in _PADS])
of(
    "MirrorPad",
    [case(V("real", s), K(pads), mode="SYMMETRIC") for s, pads in _PADS],
)
of(
    "MirrorPadGrad",
    [
        case(
            V("real", tuple(n and 4 for n in s), ("rows", "mixed", "divided")),
            K(pads),
            mode="SYMMETRIC",
        )
        for s, pads in _PADS
    ],
)
of(
    "HistogramFixedWidth",
    [case(x, K([0.2, 0.8], "float64"), K(3)) for x in rowwise("unit")],
)
of(
    "PadV2",
    [case(V("real", s, ROW_FORMS), K(pads), _NUMBER) for s, pads in _PADS],
)
of(
    "UnsortedSegmentSum",
    [
        case(V("real", s), V("int", (N,)), K(3), aligned=True)
        for s in ((N,), (N, 3))
    ]
    + [case(V("real", (N, 3)), V("int", (N, 3)), K(3), aligned=True)],
)

_PLACE = V("int", (N, 1))
of(
    "ScatterNd",
    [
        case(_PLACE, V("real", (N,)), K([3]), aligned=True),
        case(V("int", (N, 2)), V("real", (N, 2)), K([3, 3, 2]), aligned=True),
        case(V("int", (2, N, 1)), V("real", (2, N)), K([3]), aligned=True),
        case(V("int", (2, N)), V("real", (2,)), K([3, 3]), aligned=True),
        case(_PLACE, V("bool", (N,)), K([3]), aligned=True),
    ],
)

# Products.


def products(type_name, names, cases):
    for one, other in cases:
        for a, b in itertools.product((False, True), repeat=2):
            attributes = dict(zip(names, (a, b), strict=True))
            if type_name == "BatchMatMulV3":
                attributes["Tout"] = "float64"
            is_old = type_name == "BatchMatMul" and len(one) > 2
            forms = ROW_FORMS if is_old else FEW  # it does not broadcast
            slots = V("real", one, forms), V("real", other, forms)
            of(type_name, [case(*slots, aligned=True, **attributes)])


_MATRICES = [
    *(((N, 3), (3, 3)), ((3, N), (3, 3)), ((3, 3), (N, 3))),
    *(((3, 3), (3, N)), ((N, 3), (N, 3)), ((N, 3), (3, N))),
    *(((3, N), (3, N)), ((3, N), (N, 3))),
]
_BATCHES = [
    *(((N, 2, 2), (N, 2, 2)), ((N, 2, 2), (2, 2)), ((2, 2), (N, 2, 2))),
    *(((2, N, 3), (2, N, 3)), ((2, N, 3), (2, 3, 3))),
    *(((N, 2, 2), (1, 2, 2)), ((2, N, 2, 2), (2, N, 2, 2))),
]
products("MatMul", ("transpose_a", "transpose_b"), _MATRICES)
for _name, _factors in (
    ("BatchMatMul", [*_MATRICES[:5], _BATCHES[0], _BATCHES[-1]]),
    ("BatchMatMulV2", [*_MATRICES[:5], *_BATCHES]),
    ("BatchMatMulV3", [*_MATRICES[:5], *_BATCHES[:2]]),
):
    products(_name, ("adj_x", "adj_y"), _factors)
for _equation, *_shapes in (
    ("ij,ij->i", (N, 3), (N, 3)),
    ("ij,kj->ik", (N, 3), (3, 3)),
    ("ij,ik->jk", (N, 3), (N, 2)),
    ("ij->ji", (N, 3)),
    ("ij->j", (N, 3)),
    ("ij->i", (2, N)),
    ("ij,jk->ik", (N, 3), (3, 2)),
    ("ijk,kl->jil", (N, 2, 3), (3, 2)),
    ("i,i->", (N,), (N,)),
    ("ij,ij,i->i", (N, 3), (N, 3), (N,)),
    ("ij,j->i", (N, 3), (3,)),
):
    of(
        "Einsum",
        [
            case(
                L(*[V("real", shape, SMALL) for shape in _shapes]),
                equation=_equation,
                aligned=True,
            )
        ],
    )

# What treats each sample for itself.

_IMAGES = V("real", (N, 4, 4, 4), ROW_FORMS)
_IMAGES32 = V("real32", (N, 4, 4, 4), ROW_FORMS)
_OTHER_AXIS = V("real", (4, N, 4, 4), ROW_FORMS)
_POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
_POOL3 = {
    "ksize": [1, 2, 2, 2, 1],
    "strides": [1, 2, 2, 2, 1],
    "padding": "VALID",
}
_CONV = {"strides": [1, 1, 1, 1], "padding": "VALID"}
_CONV3 = {"strides": [1, 1, 1, 1, 1], "padding": "VALID"}
_VOLUME = V("real", (N, 2, 2, 2, 3), ROW_FORMS)
of("AvgPool MaxPool", [case(_IMAGES, **_POOL), case(_OTHER_AXIS, **_POOL)])
of(
    "AvgPool3D MaxPool3D",
    [case(V("real32", (N, 2, 2, 2, 3), ROW_FORMS), **_POOL3)],
)
of("DepthToSpace SpaceToDepth", [case(_IMAGES, block_size=2)])
of(
    "ExtractImagePatches",
    [
        case(
            _IMAGES,
            ksizes=[1, 2, 2, 1],
            strides=[1, 2, 2, 1],
            rates=[1, 1, 1, 1],
            padding="VALID",
        )
    ],
)
of(
    "ExtractVolumePatches",
    [
        case(
            _VOLUME,
            ksizes=[1, 2, 2, 2, 1],
            strides=[1, 1, 1, 1, 1],
            padding="VALID",
        )
    ],
)
of("LRN", [case(_IMAGES32)])
_FILTER = V("real", (2, 2, 4, 2), STATISTICS)
of("Conv2D DepthwiseConv2dNative", [case(_IMAGES, _FILTER, **_CONV)])
of("Conv3D", [case(_VOLUME, V("real", (2, 2, 2, 3, 2)), **_CONV3)])
of(
    "Dilation2D",
    [
        case(
            _IMAGES,
            V("real", (2, 2, 4), STATISTICS),
            rates=[1, 1, 1, 1],
            **_CONV,
        )
    ],
)
_RESIZE = "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor"
of(_RESIZE, [case(_IMAGES, K([2, 3])), case(_OTHER_AXIS, K([2, 3]))])
of(
    "Conv2DBackpropInput",
    [
        case(
            S(N, 4, 4, 4),
            _FILTER,
            V("real", (N, 3, 3, 2)),
            aligned=True,
            **_CONV,
        )
    ],
)
of(
    "DepthwiseConv2dNativeBackpropInput",
    [
        case(
            S(N, 4, 4, 4),
            _FILTER,
            V("real", (N, 3, 3, 8)),
            aligned=True,
            **_CONV,
        )
    ],
)
of(
    "Conv3DBackpropInputV2",
    [
        case(
            S(N, 2, 2, 2, 3),
            V("real", (2, 2, 2, 3, 2), STATISTICS),
            V("real", (N, 1, 1, 1, 2)),
            aligned=True,
            **_CONV3,
        )
    ],
)
_SIZES = K([2, 2, 4, 2])
of(
    "Conv2DBackpropFilter",
    [case(_IMAGES, _SIZES, V("real", (N, 3, 3, 2)), aligned=True, **_CONV)],
)
of(
    "DepthwiseConv2dNativeBackpropFilter",
    [case(_IMAGES, _SIZES, V("real", (N, 3, 3, 8)), aligned=True, **_CONV)],
)
of(
    "Conv3DBackpropFilterV2",
    [
        case(
            _VOLUME,
            K([2, 2, 2, 3, 2]),
            V("real", (N, 1, 1, 1, 2)),
            aligned=True,
            **_CONV3,
        )
    ],
)
of(
    "ResizeBicubicGrad ResizeBilinearGrad",
    [case(V("real32", (N, 2, 2, 4), ROW_FORMS), _IMAGES, aligned=True)],
)
of("ResizeNearestNeighborGrad", [case(_IMAGES, K([2, 2]))])
of("LRNGrad", [case(*[_IMAGES32] * 3, aligned=True)])
of(
    "AvgPool3DGrad",
    [
        case(
            S(N, 2, 2, 2, 3),
            V("real32", (N, 1, 1, 1, 3)),
            aligned=True,
            **_POOL3,
        )
    ],
)
of(
    "AvgPoolGrad",
    [case(S(N, 4, 4, 4), V("real", (N, 2, 2, 4)), aligned=True, **_POOL)],
)
_POOLED = V("real", (N, 2, 2, 4), ROW_FORMS)
of("MaxPoolGrad", [case(_IMAGES, _POOLED, _POOLED, aligned=True, **_POOL)])
_POOLED3 = [
    V(domain, (N, 1, 1, 1, 3), ROW_FORMS) for domain in ("one32", "real32")
]
of(
    "MaxPool3DGrad",
    [
        case(
            V("one32", (N, 2, 2, 2, 3), ROW_FORMS),
            *_POOLED3,
            aligned=True,
            **_POOL3,
        )
    ],
)
of(
    "ImageProjectiveTransformV3",
    [
        case(
            _IMAGES,
            V("real32", (N, 8), ROW_FORMS),
            K([3, 3]),
            V("real32", (), STATISTICS),
            interpolation="BILINEAR",
            aligned=True,
        )
    ],
)
_SQUARES = [
    V("matrix", s, ROW_FORMS) for s in ((N, 2, 2), (3, N, 2, 2), (2, N, 2))
]
of(
    "Cholesky MatrixDeterminant MatrixInverse "
    "MatrixSquareRoot Qr SelfAdjointEigV2 Svd",
    [case(x) for x in _SQUARES],
)
of(
    "LogMatrixDeterminant Lu",
    [case(V("real", x.shape, ROW_FORMS)) for x in _SQUARES],
)
of("Eig", [case(x, Tout="complex128") for x in _SQUARES])
of(
    "MatrixLogarithm",
    [case(V("complex matrix", x.shape, ROW_FORMS)) for x in _SQUARES],
)
_MATRIX = [V("real", x.shape, ROW_FORMS) for x in _SQUARES]
of("MatrixBandPart", [case(x, K(0), K(-1)) for x in _MATRIX])
of("MatrixDiagPart", [case(x) for x in _MATRIX])
of(
    "MatrixDiagPartV2 MatrixDiagPartV3",
    [
        case(x, K(diagonals), K(0, "float64"))
        for x in _MATRIX
        for diagonals in (0, [0, 1])
    ],
)
_VECTORS = rowwise("real", SOME_SHAPES, ROW_FORMS)
of("MatrixDiag", [case(x) for x in _VECTORS])
of(
    "MatrixDiagV2 MatrixDiagV3",
    [case(x, K(0), K(-1), K(-1), K(0, "float64")) for x in _VECTORS],
)
of(
    "MatrixSetDiagV3",
    [
        case(x, V("real", x.shape[:-1], ROW_FORMS), K(0), aligned=True)
        for x in _MATRIX
    ],
)
of(
    "OneHot",
    [
        case(x, K(3), _NUMBER, K(0, "float64"), axis=axis)
        for x in rowwise("int", SOME_SHAPES, ROW_FORMS)
        for axis in (-1, 0, 1)
        if axis <= len(x.shape)
    ],
)
_LOGITS = V("real", (N, 3))
of(
    "SparseSoftmaxCrossEntropyWithLogits",
    [case(_LOGITS, V("int", (N,)), aligned=True)],
)
of(
    "SoftmaxCrossEntropyWithLogits",
    [
        case(V("real", s, ROW_FORMS), V("real", s, ROW_FORMS), aligned=True)
        for s in ((N, 3), (3, N))
    ],
)
of(
    "InTopKV2",
    [case(V("real32", (N, 3)), V("int", (N,)), K(1), aligned=True)],
)
_SHIFTS = K(np.arange(16).reshape(2, 2, 4) % 3, "float64")
of(
    "Dilation2DBackpropInput Dilation2DBackpropFilter",
    [
        case(
            _IMAGES,
            _SHIFTS,
            V("real", (N, 3, 3, 4)),
            rates=[1] * 4,
            aligned=True,
            **_CONV,
        )
    ],
)
of(
    "DrawBoundingBoxesV2",
    [
        case(
            V("unit32", (N, 6, 6, 3), ROW_FORMS),
            V("unit32", (N, 2, 4), ROW_FORMS),
            K(np.eye(3), "float32"),
            aligned=True,
        )
    ],
)
of(
    "Fingerprint",
    [
        case(x, K("farmhash64", "string"))
        for x in rowwise("int", [(N, 3), (2, N)], ROW_FORMS)
    ],
)
of(
    "Cross",
    [
        case(*[V("real", s, ROW_FORMS)] * 2, aligned=True)
        for s in ((N, 3), (2, N, 3), (3, N))
    ],
)
_COLORS = [V("unit", s, ROW_FORMS) for s in ((N, 3), (2, N, 3), (2, 3, N))]
_COLORS32 = [V("unit32", s, ROW_FORMS) for s in ((N, 2, 2, 3), (2, N, 2, 3))]
of("RGBToHSV HSVToRGB", [case(x) for x in _COLORS])
_WAVES = [(N, 2, 2), (N, 2, 2, 2), (2, N, 2, 2), (2, N, 2)]
of(
    "FFT2D IFFT2D FFT3D IFFT3D",
    [case(V("complex", s, ROW_FORMS)) for s in _WAVES],
)
of(
    "AdjustContrastv2 AdjustHue AdjustSaturation",
    [case(x, V("unit32", (), STATISTICS)) for x in _COLORS32]
    + [case(x, K(0.3, "float32")) for x in _COLORS32],
)
of(
    "RFFT2D",
    [
        case(V("real", s, ROW_FORMS), _LENGTHS, Tcomplex="complex128")
        for s in _WAVES
    ],
)
of(
    "RFFT3D",
    [
        case(V("real", s, ROW_FORMS), K([2, 2, 2]), Tcomplex="complex128")
        for s in ((N, 2, 2, 2), (2, N, 2, 2))
    ],
)
of(
    "IRFFT3D",
    [
        case(V("complex", s, ROW_FORMS), K([2, 2, 2]), Treal="float64")
        for s in ((N, 2, 2, 2), (2, N, 2, 2))
    ],
)
of(
    "IRFFT2D",
    [
        case(V("complex", s, ROW_FORMS), _LENGTHS, Treal="float64")
        for s in _WAVES
    ],
)
of(
    "FakeQuantWithMinMaxVarsPerChannel",
    [
        case(x, *[K([v] * 3, "float32") for v in (0.1, 0.7)])
        for x in rowwise("unit32", [(N, 3), (2, N, 3)], ROW_FORMS)
    ],
)


@dataclasses.dataclass(frozen=True)
class Made:
    """An input that a function makes, of the operands.

    Args:
        make: Takes the operands, and operations that run before the others.
    """

    make: Any
    forms: tuple = ("made",)


def _places_apart(operands, _):
    """Makes places in the batch, each number of which is on its own."""
    with operands.graph.as_default():
        places = tf.where(operands("rows", "bool", (N, 1)))
        return tf.expand_dims(places, 2)


of("GatherNd", [case(V("real", (N, 3), ("rows",)), Made(_places_apart))])
_CHOSEN = Made(lambda operands, _: operands.chosen_draws())
of("Shape Size", [case(_CHOSEN)])
of("ShapeN", [case(L(_CHOSEN, V("real", (N, 3))))])


def _variable(operands, before):
    with operands.graph.as_default():
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float64, shape=[4, 3], shared_name="table"
        )
        value = tf.constant(np.arange(12.0).reshape(4, 3) ** 2)
        before.append(tf.raw_ops.AssignVariableOp(resource=handle, value=value))
    return handle


def _table(operands, before):
    with operands.graph.as_default():
        handle = tf.raw_ops.HashTableV2(
            key_dtype=tf.int32, value_dtype=tf.float64, shared_name="numbers"
        )
        keys = tf.constant([0, 1, 2])
        values = tf.constant([0.5, 3.0, 7.0], tf.float64)
        before.append(
            tf.raw_ops.LookupTableImportV2(
                table_handle=handle, keys=keys, values=values
            )
        )
    return handle


of(
    "LookupTableFindV2",
    [
        case(Made(_table), x, K(-1, "float64"))
        for domain in ("int", "bits")
        for x in rowwise(domain, forms=ROW_FORMS)
    ],
)
of(
    "ResourceGather",
    [
        case(Made(_variable), x, dtype="float64")
        for x in rowwise("int", forms=ROW_FORMS)
    ],
)
of(
    "ResourceGatherNd",
    [
        case(Made(_variable), V("int", s, ROW_FORMS), dtype="float64")
        for s in ((N, 1), (N, 2), (2, N, 2), (2, N))
    ],
)


def _ragged(part):
    return Made(lambda operands, _: operands.ragged()[part])


of(
    "RaggedTensorToTensor",
    [
        case(
            K([-1, width], "int64"),
            _ragged(0),
            K(0, "float64"),
            L(_ragged(1)),
            row_partition_types=["ROW_SPLITS"],
        )
        for width in (4, 2, -1)
    ],
)


of("StringSplitV2", [case(V("string", (N,)), K(" ", "string"))])

# Random numbers.

_SAME = ("equal", "random")
_OF_SHAPE = S(N, 3), K([2, 3])
_ONE_EACH = V("real", (N, 3), ("shape",))
_SEED = V("int", (2,), _SAME)
_KEY = (V("key", (1,), _SAME), V("key", (2,), ("equal",)), K(1))
_SINGLE = V("unit", (), _SAME)
_PER_SAMPLE = V("unit", (N, 3), ("rows", "mixed"))
_BOUNDS = K(0), K(9)
_AROUND = _SINGLE, K(-1, "float64"), K(2, "float64")
for _size in _OF_SHAPE:
    of(
        "RandomUniform RandomStandardNormal TruncatedNormal",
        [case(_size, dtype="float64")],
    )
    of("RandomUniformInt", [case(_size, *_BOUNDS)])
    of("RandomGamma RandomPoissonV2", [case(_size, _SINGLE)])
    of("ParameterizedTruncatedNormal", [case(_size, _SINGLE, *_AROUND)])
    of(
        "StatelessRandomNormal StatelessRandomUniform StatelessTruncatedNormal",
        [case(_size, _SEED, dtype="float64")],
    )
    of("StatelessRandomUniformFullInt", [case(_size, _SEED, dtype="int32")])
    of("StatelessRandomUniformInt", [case(_size, _SEED, *_BOUNDS)])
    of(
        "StatelessRandomNormalV2 StatelessRandomUniformV2 "
        "StatelessTruncatedNormalV2",
        [case(_size, *_KEY, dtype="float64")],
    )
    of("StatelessRandomUniformFullIntV2", [case(_size, *_KEY, dtype="int32")])
    of("StatelessRandomUniformIntV2", [case(_size, *_KEY, *_BOUNDS)])
for _size, _each in ((_ONE_EACH, _PER_SAMPLE), (_OF_SHAPE[1], _SINGLE)):
    of(
        "StatelessRandomGammaV2",
        [case(_size, _SEED, _each)],
    )
    of("StatelessRandomGammaV3", [case(_size, *_KEY, _each)])
    of("StatelessRandomPoisson", [case(_size, _SEED, _each, dtype="int32")])
    of(
        "StatelessRandomBinomial",
        [case(_size, _SEED, K(5.0, "float64"), _each)],
    )
    of(
        "StatelessParameterizedTruncatedNormal",
        [case(_size, _SEED, _each, *_AROUND)],
    )
_ODDS = V("unit", (N, 3), ROW_FORMS), V("unit", (2, 3), _SAME)
of("Multinomial", [case(each, K(2)) for each in _ODDS])
of("StatelessMultinomial", [case(each, K(2), _SEED) for each in _ODDS])
of("RandomShuffle", [case(V("real", (3, 2), _SAME))])


def _generator(operands, before):
    with operands.graph.as_default():
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.int64, shape=[3], shared_name="generator"
        )
        state = tf.constant([1, 2, 3], tf.int64)
        before.append(tf.raw_ops.AssignVariableOp(resource=handle, value=state))
    return handle


of("RngReadAndSkip", [case(Made(_generator), K(1), K(10, "uint64"))])
for _size, _each in ((_ONE_EACH, _PER_SAMPLE), (_OF_SHAPE[1], _SINGLE)):
    of(
        "StatefulRandomBinomial",
        [
            case(
                Made(_generator),
                K(1, "int64"),
                _size,
                K(5.0, "float64"),
                _each,
            )
        ],
    )

# Lists.


def _list_of(domain, shape, form):
    """Makes a list of two elements, which are of a form."""

    def make(operands, _):
        element = operands(form, domain, shape)
        if element is None:
            return None
        with operands.graph.as_default():
            empty = tf.raw_ops.EmptyTensorList(
                element_shape=-1, max_num_elements=-1, element_dtype=tf.float64
            )
            for _ in range(2):
                empty = tf.raw_ops.TensorListPushBack(
                    input_handle=empty, tensor=element
                )
            return empty

    return Made(make)


_LISTS = [
    _list_of("real", shape, form)
    for shape in ((N, 3), (2, N))
    for form in ("equal", *FEW, "mean")
]
_UNTOLD = [(x, K(-1)) for x in _LISTS]
_TOLD = _list_of("real", (N, 3), "rows"), V("real", (N, 3), ("shape",))
of(
    "TensorListFromTensor",
    [case(V("real", s), K(-1)) for s in ((2, N), (2, N, 3), (2, 3, N), (N, 2))],
)
of(
    "TensorListStack",
    [case(*x, element_dtype="float64") for x in (*_UNTOLD, _TOLD)],
)
of(
    "TensorListGetItem",
    [
        case(x, K(1), size, element_dtype="float64")
        for x, size in (*_UNTOLD, _TOLD)
    ],
)
_PAIRS = [
    (_list_of("real", (N, 3), one), V("real", (N, 3), (other,)))
    for forms in (
        ("rows", "mixed", "divided"),
        ("equal", "total", "mean", "derived", "random", "counted"),
        ("some",),
        ("joined",),
    )
    for one, other in itertools.product(forms, repeat=2)
]
of("TensorListSetItem", [case(x, K(1), item) for x, item in _PAIRS])
of("TensorListPushBack", [case(x, item) for x, item in _PAIRS])
of(
    "TensorListPopBack",
    [case(*x, element_dtype="float64") for x in (*_UNTOLD, _TOLD)],
)
of("TensorListLength", [case(x) for x in _LISTS])
