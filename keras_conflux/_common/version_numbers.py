"""Versions as numbers, which can be compared."""

import re


def numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: `(3, 15, 1)` of `"3.15.1"`."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:3])
