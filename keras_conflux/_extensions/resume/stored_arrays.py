"""Arrays as NumPy's files hold them."""

import io
import json
import struct
import zipfile
from typing import Any
from typing import BinaryIO

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


def read(file: BinaryIO) -> Arrays:
    """Returns the arrays of a file.

    Raises:
        ValueError: If it is none of NumPy's, or would unpack to more bytes than
            it has. This package writes no compressed files.
    """
    size = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as packed:
            members = packed.infolist()
        if sum(each.file_size for each in members) > size or any(
            each.compress_type != zipfile.ZIP_STORED for each in members
        ):
            raise ValueError("it would unpack to more than it is")
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
    except (zipfile.BadZipFile, RuntimeError, EOFError, struct.error) as error:
        raise ValueError(f"it is not a file of arrays: {error}") from error
    strange = [k for k, v in arrays.items() if not isinstance(v, np.ndarray)]
    if strange:
        raise ValueError(f"{strange} are no arrays")
    return arrays


def to_bytes(document: Any, arrays: Arrays) -> bytes:
    """Returns a JSON document and some arrays as one string of bytes."""
    stored, special = without_special_dtypes(arrays)
    text = np.array(json.dumps([document, special]))
    file = io.BytesIO()
    np.savez(file, text=text, **stored)  # pyright: ignore
    return file.getvalue()


def from_bytes(content: bytes) -> tuple[Any, Arrays]:
    """Undoes `to_bytes`."""
    arrays = read(io.BytesIO(content))
    document, special = json.loads(str(arrays.pop("text")))
    return document, with_special_dtypes(arrays, special)
