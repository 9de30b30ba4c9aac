"""A few numbers by which a batch is known again.

They are sums of some of its entries, with signs that are always the same, and
bear roundings, as of another processor.
"""

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._common.trees import Tree

_ENTRIES = 4096
"""How many entries of a tensor are read at most."""
_SUMS = 8
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], [2 * _ENTRIES, _SUMS])
_OF_DEVIATION, _OF_MEAN = 5e-2, 1e-4
"""The changes by roundings, by entry: pixels by one, for example."""


def sketch(batch: Tree) -> np.ndarray:
    """Returns a row for each tensor of a batch: sums and their tolerance."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    rows = [_row(leaf) for leaf in leaves if isinstance(leaf, tf.Tensor)]
    return np.array(rows).reshape(len(rows), _SUMS + 1)


def are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two sketches are of the same batch."""
    if one.shape != other.shape:
        return False
    gaps = np.abs(one[:, :_SUMS] - other[:, :_SUMS])
    return bool(np.all(gaps <= one[:, _SUMS:]))


def _row(tensor: Any) -> np.ndarray:
    flat = np.ravel(np.asarray(tensor))
    entries = flat[:: max(1, len(flat) // _ENTRIES)]
    if entries.dtype == object:  # strings
        entries = np.array([zlib.crc32(each) for each in entries])
    entries = np.nan_to_num(entries.astype(np.float64), posinf=0, neginf=0)
    if not len(entries):
        return np.zeros(_SUMS + 1)
    spread = _OF_DEVIATION * entries.std() + _OF_MEAN * np.abs(entries).mean()
    tolerance = np.sqrt(len(entries)) * spread
    return np.append(entries @ _SIGNS[: len(entries)], tolerance)
