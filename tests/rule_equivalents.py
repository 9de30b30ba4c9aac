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
    **{name: {_QUOTIENT: _SAME_SIGN} for name in ("Sign", "Angle")},
    **{
        name: {_QUOTIENT: _SAME_HOLES}
        for name in ("IsFinite", "IsInf", "IsNan")
    },
}
"""By type, the claims, and why they hold."""
