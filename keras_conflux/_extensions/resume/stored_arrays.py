"""A JSON document and arrays, as one of NumPy's files."""

import io
import json
import zipfile
from typing import Any
from typing import BinaryIO

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]


def write(file: Any, document: Any, arrays: Arrays) -> None:
    """Writes them to a path or a file.

    NumPy reads bfloat16 and float8 back as bytes without a meaning, so their
    names tell them. Structured arrays, of the same kind, it reads as they were.
    """
    stored = {}
    for name, array in arrays.items():
        dtype = array.dtype
        if dtype.kind == "V" and hasattr(ml_dtypes, dtype.name):
            stored[f"{name}:{dtype.name}"] = array.view(f"u{dtype.itemsize}")
        else:
            stored[name] = array
    np.savez(file, text=np.array(json.dumps([document, [*stored]])), **stored)


def read(file: BinaryIO) -> tuple[Any, Arrays]:
    """Undoes `write`, of a file that is no larger when it is unpacked.

    All of its bytes are read, and compared with the checksums there.
    """
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as packed:
        members = packed.infolist()
    if sum(each.file_size for each in members) > size or any(
        each.compress_type != zipfile.ZIP_STORED for each in members
    ):
        raise ValueError("it would unpack to more than it is")
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        arrays = dict(stored)
    strange = [k for k, v in arrays.items() if not isinstance(v, np.ndarray)]
    if strange:
        raise ValueError(f"{strange} are no arrays")
    document, names = json.loads(str(arrays.pop("text")))
    # The directory of such a file has no checksum of its own.
    if arrays.keys() != {*names}:
        raise ValueError("it has lost some arrays")
    return document, dict(_with_dtype(*each) for each in arrays.items())


def _with_dtype(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    name, _, dtype = name.partition(":")
    return name, array.view(getattr(ml_dtypes, dtype)) if dtype else array
