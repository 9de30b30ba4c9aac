"""What a `PyDataset` holds, or says that it holds."""

import copy
import zlib
from typing import Any

import numpy as np

from keras_conflux._extensions.resume import plain_values

_LARGE = 8 * 2**20
"""Arrays of more bytes are saved only if they change: most are the samples."""
_ENTRIES = 2**21
"""How many entries of such an array tell whether it has changed."""
_STATE = "state_dict()"  # no attribute has such a name


class PyDatasetState:
    """Takes and gives back what a `PyDataset` holds.

    Args:
        owner: The `PyDataset`, as the script has made it; `None` for other
            data, which hold nothing.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._first = {
            name: _mark(value) for name, value in _large_arrays(owner).items()
        }

    def taken(self) -> dict[str, Any] | None:
        """Returns copies of what it holds, or says that it holds."""
        owner = self._owner
        if owner is None:
            return None
        if _tells_its_state(owner):
            return {_STATE: copy.deepcopy(plain_values.told_state(owner))}
        return plain_values.attributes(owner, _LARGE) | {
            name: np.array(value)
            for name, value in _large_arrays(owner).items()
            if _mark(value) != self._first.get(name)
        }

    def restore(self, attributes: dict[str, Any] | None) -> None:
        """Gives back what `taken` returned."""
        owner = self._owner
        if owner is None or attributes is None:
            return
        if _tells_its_state(owner) != (_STATE in attributes):
            raise ValueError(
                f"`{type(owner).__name__}` has got or lost the methods "
                "`state_dict` and `load_state_dict` since the checkpoint was "
                "saved. Give the training the data that it had, or begin "
                "another one in another directory."
            )
        attributes = copy.deepcopy(attributes)
        if _STATE in attributes:
            owner.load_state_dict(attributes[_STATE])
        else:
            vars(owner).update(attributes)


def _large_arrays(owner: Any) -> dict[str, np.ndarray]:
    held = {} if owner is None else vars(owner)
    return {
        name: value
        for name, value in held.items()
        if isinstance(value, np.ndarray)
        if value.nbytes > _LARGE and not value.dtype.hasobject
    }


def _mark(array: np.ndarray) -> tuple:
    """Returns by what it is seen, within a process, that an array changes."""
    seen = array.shape, array.dtype.str
    if isinstance(array, np.memmap) or not array.flags.writeable:
        return *seen, id(array)
    entries = array.flat[:: max(1, array.size // _ENTRIES)]
    return *seen, zlib.crc32(entries.tobytes())


def _tells_its_state(owner: Any) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
