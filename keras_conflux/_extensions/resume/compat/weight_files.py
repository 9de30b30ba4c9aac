"""Keras' files of weights, from copies that were taken before."""

import contextlib
import pathlib
from typing import Any

import h5py
import keras
import numpy as np

from keras_conflux._compat.private_names import module_if_any

saving_lib = module_if_any("keras.src.saving.saving_lib")
_Store: Any = getattr(saving_lib, "H5IOStore", object)

Entry = tuple[str, Any, dict[str, Any]]
"""The path of a layer or an optimizer in a file of weights, Keras' metadata
there, and its variables, or their values, by name."""


def entries_of(model: keras.Model) -> list[Entry]:
    """Returns the entries that Keras would write for a model."""
    recorder = _Recorder()
    saving_lib._save_state(model, recorder, None, "", set())
    return recorder.entries


def copied(entries: list[Entry]) -> list[Entry]:
    """Returns entries with copies of their values, on the host."""
    return [
        (path, metadata, {k: _copied(v) for k, v in values.items()})
        for path, metadata, values in entries
    ]


def _copied(value: Any) -> np.ndarray:
    # A variable gives a copy. Another one would hold training up as long again.
    if isinstance(value, keras.Variable):
        return value.numpy()
    return np.array(keras.ops.convert_to_numpy(value))


def write(entries: list[Entry], path: pathlib.Path) -> None:
    """Writes a file, as `model.save_weights` would have."""
    with contextlib.closing(_Store(str(path), mode="w")) as store:
        for place, metadata, values in entries:
            group = store.make(place, metadata=metadata)
            for name, value in values.items():
                group[name] = value


def assert_plain(path: pathlib.Path) -> None:
    """Refuses a file of other values than numbers, or of more than it has."""
    sizes: list[int] = []

    def note(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            kind = found.dtype
            # NumPy has bfloat16 as bytes ("V") without fields or axes.
            if kind.kind not in "biufcV" or kind.names or kind.subdtype:
                raise ValueError(f"{path.name} has {kind} under {name!r}.")
            sizes.append((found.size or 0) * kind.itemsize)

    with h5py.File(path, "r") as file:
        file.visititems(note)
    if sum(sizes) > path.stat().st_size:
        raise ValueError(f"{path.name} would unpack to {sum(sizes)} bytes.")


class _Recorder(_Store):
    """Records the entries of layers, and writes no file."""

    def __init__(self) -> None:
        # Keras' own would open a file.
        self.entries: list[Entry] = []

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> Any:
        self.entries.append((path, metadata, {}))
        return self.entries[-1][-1]
