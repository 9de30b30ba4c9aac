"""Checks arguments of users. Errors of type or value say what to write."""

import math
import numbers
from collections.abc import Iterable
from typing import Any


def assert_count(name: str, value: Any, what: str, least: int = 1) -> None:
    """Refuses a value that is no whole number, or too small."""
    said = f"`{name}` is {what}, at least {least}. Received: {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(said)
    if value < least:
        raise ValueError(said)


def assert_root(root: Any, count: int, call: str = "") -> None:
    """Refuses what is the index of none of some replicas."""
    if root not in range(count):
        raise ValueError(
            f"{call}`root` is the index of a replica, from 0 to {count - 1}. "
            f"Received: {root}."
        )


def assert_seconds(name: str, value: Any) -> None:
    """Refuses a value that is no number of seconds above 0."""
    said = f"`{name}` is a number of seconds above 0. Received: {value!r}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(said)
    if math.isnan(value) or value <= 0:
        raise ValueError(said)


def assert_is(value: Any, kinds: Any, expected: str) -> None:
    """Refuses a value of another type."""
    if not isinstance(value, kinds):
        raise TypeError(f"Expected {expected}. Received: {value!r}")


def assert_batches(value: Any) -> None:
    """Refuses a value that yields no batches."""
    is_drawn_from = isinstance(value, Iterable) or hasattr(value, "__getitem__")
    if isinstance(value, str | bytes) or not is_drawn_from:
        raise TypeError(
            "Expected a `tf.data.Dataset`, or a list or generator of batches. "
            f"Received: {value!r}"
        )
