"""Keras' files of weights, from copies that were taken before."""

import dataclasses
import pathlib
from typing import Any

import keras
import numpy as np
from keras.src.saving import saving_lib


@dataclasses.dataclass
class WeightCopies:
    """Copies of what Keras writes into a file of weights."""

    entries: list[tuple[str, Any, dict[str, np.ndarray]]] = dataclasses.field(
        default_factory=list
    )
    """Paths in the file, what is noted there, and the arrays by name."""
    copied: set[int] = dataclasses.field(default_factory=set)
    """The ids of the variables whose values these are."""

    @classmethod
    def of(cls, model: keras.Model) -> "WeightCopies":
        """Copies the weights and the optimizer's variables to the host."""
        copies = cls()
        saving_lib._save_state(model, _Recorder(copies), None, "", set())
        return copies

    def write(self, path: pathlib.Path) -> None:
        """Writes the file, as `model.save_weights` would have."""
        store = saving_lib.H5IOStore(str(path), mode="w")
        try:
            for inner_path, metadata, arrays in self.entries:
                entry = store.make(inner_path, metadata=metadata)
                for key, array in arrays.items():
                    entry[key] = array
        finally:
            store.close()


class _Recorder(saving_lib.H5IOStore):
    """Takes what layers give it, and writes no file."""

    def __init__(self, copies: WeightCopies) -> None:
        # Keras' own would open a file.
        self._copies = copies

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> Any:
        arrays: dict[str, np.ndarray] = {}
        self._copies.entries.append((path, metadata, arrays))
        return _Entry(arrays, self._copies.copied)

    def close(self) -> None:
        pass


class _Entry(dict):
    """What one layer gives."""

    def __init__(self, arrays: dict[str, np.ndarray], copied: set[int]) -> None:
        super().__init__()
        self._arrays = arrays
        self._copied = copied

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, keras.Variable):
            self._copied.add(id(value))
        self._arrays[key] = np.array(keras.ops.convert_to_numpy(value))
        super().__setitem__(key, value)
