"""Arrays as NumPy's files hold them."""

import io
import json
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]


def without_special_dtypes(arrays: Arrays) -> tuple[Arrays, dict[str, str]]:
    """Returns arrays that NumPy's files can hold, and which were others.

    NumPy reads bfloat16 and float8 back as bytes without a meaning. Structured
    arrays, which are of the same kind, it reads as they were.
    """
    special = {
        name: array.dtype.name
        for name, array in arrays.items()
        if array.dtype.kind == "V" and hasattr(ml_dtypes, array.dtype.name)
    }
    stored = {
        name: array.view(f"u{array.dtype.itemsize}")
        if name in special
        else array
        for name, array in arrays.items()
    }
    return stored, special


def with_special_dtypes(arrays: Arrays, special: dict[str, str]) -> Arrays:
    """Undoes `without_special_dtypes`."""
    return {
        name: array.view(getattr(ml_dtypes, special[name]))
        if name in special
        else array
        for name, array in arrays.items()
    }


def to_bytes(document: Any, arrays: Arrays) -> bytes:
    """Returns what JSON can hold and some arrays as one string of bytes."""
    stored, special = without_special_dtypes(arrays)
    text = np.array(json.dumps([document, special]))
    file = io.BytesIO()
    np.savez(file, text=text, **stored)  # pyright: ignore
    return file.getvalue()


def from_bytes(content: bytes) -> tuple[Any, Arrays]:
    """Undoes `to_bytes`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        arrays = dict(stored)
    document, special = json.loads(str(arrays.pop("text")))
    return document, with_special_dtypes(arrays, special)
