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
SMALL = 1e-3
"""A gap, as of floats that are computed in another order."""


def sketch(batch: Tree) -> np.ndarray:
    """Returns a row for each tensor of a batch: sums and their tolerance."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    rows = [_row(leaf) for leaf in leaves if isinstance(leaf, tf.Tensor)]
    return np.array(rows).reshape(len(rows), _SUMS + 1)


def gap(one: np.ndarray, other: np.ndarray) -> float:
    """Returns how far two sketches differ, as a share of their tolerance."""
    if one.shape != other.shape:
        return np.inf
    gaps = np.abs(one[:, :_SUMS] - other[:, :_SUMS])
    with np.errstate(divide="ignore"):
        shares = np.divide(gaps, one[:, _SUMS:], where=gaps > 0, out=gaps)
    return shares.max(initial=0)


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
