"""What the first process has read, given to all."""

import io
import json
import pathlib
from collections.abc import Callable

import numpy as np

from keras_conflux._cluster.agreement import given_by
from keras_conflux._cluster.agreement import told_by_all
from keras_conflux._cluster.failures import told_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.plain_values import with_special_dtypes
from keras_conflux._common.plain_values import without_special_dtypes
from keras_conflux._resume.checkpoint_files import Saved


def read(function: Callable[[], Saved | None]) -> Saved | None:
    """Calls a function in the first process, and returns its result in all.

    The other processes may have no access to its files.
    """
    if process_count() == 1:
        return function()
    with told_to_all("reading a checkpoint"):
        saved = function() if process_index() == 0 else None
        content = b"" if saved is None else _packed(saved)
        lengths = told_by_all("reading a checkpoint", len(content))
        content = given_by(0, content, lengths[0])
    if process_index() == 0 or not content:
        return saved
    return _unpacked(content)


def _packed(saved: Saved) -> bytes:
    arrays, special = without_special_dtypes(saved.arrays)
    text = json.dumps([str(saved.path), saved.state, special])
    file = io.BytesIO()
    np.savez(file, text=np.array(text), **arrays)  # pyright: ignore
    return file.getvalue()


def _unpacked(content: bytes) -> Saved:
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        arrays = dict(stored)
    path, state, special = json.loads(str(arrays.pop("text")))
    return Saved(
        pathlib.Path(path), state, with_special_dtypes(arrays, special)
    )
