"""Bytes as people read them."""

from collections.abc import Sequence

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))


def readable(value: int) -> str:
    """Returns a number of bytes with the largest unit that fits."""
    unit = unit_of(value)
    return f"{in_unit(value, unit)} {unit}"


def unit_of(value: int) -> str:
    """Returns the largest unit in which a number of bytes is at least 1."""
    return next((unit for unit, size in _UNITS if value >= size), "bytes")


def in_unit(value: int | None, unit: str) -> str:
    """Returns a number of bytes without its unit, `"?"` for `None`."""
    if value is None:
        return "?"
    return f"{value / dict(_UNITS)[unit]:.3g}"


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, whose first column is words and the others figures."""
    found = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(
                    cell.rjust(width)
                    for cell, width in zip(row[1:], widths[1:], strict=True)
                ),
            ]
        )
        for row in found
    )
