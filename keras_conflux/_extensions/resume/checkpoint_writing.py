"""Writes the folders of checkpoints."""

import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume.checkpoint_files import ARRAYS
from keras_conflux._extensions.resume.checkpoint_files import FORMAT
from keras_conflux._extensions.resume.checkpoint_files import STATE
from keras_conflux._extensions.resume.checkpoint_files import WEIGHTS
from keras_conflux._extensions.resume.compat import weight_files
from keras_conflux._extensions.resume.storage import Storage
from keras_conflux._extensions.resume.stored_arrays import Arrays
from keras_conflux._extensions.resume.stored_arrays import (
    without_special_dtypes,
)


def write(
    storage: Storage,
    position: tuple[int, int],
    weights: list[weight_files.Entry],
    state: dict[str, Any],
    arrays: Arrays,
    keep: int,
) -> pathlib.Path:
    """Writes a checkpoint, and removes old ones.

    Args:
        storage: The storage. Its directory is made if it is not there.
        position: The number of steps done, and the epoch.
        weights: The contents of Keras' file of weights.
        state: Anything that JSON can hold.
        arrays: The arrays that `state` refers to.
        keep: The number of checkpoints that stay.

    Returns:
        Its path.

    Raises:
        OSError: If it cannot be written, as where a disk is full. Nothing
            remains of it then.
        NotRemoved: If it is written, and an older one could not be removed.
    """
    step, epoch = position
    final = storage.root / f"step-{step:012d}-{epoch:06d}"
    with storage.new_folder(final) as folder:
        try:
            weight_files.write(weights, folder / WEIGHTS)
        except RuntimeError as error:  # h5py's, where a disk is full
            raise OSError(str(error)) from error
        stored, special = without_special_dtypes(arrays)
        np.savez(folder / ARRAYS, **stored)  # pyright: ignore
        text = json.dumps(state | {"format": FORMAT})
        digests = {
            name: checkpoint_files.digest_of(folder, name)
            for name in (WEIGHTS, ARRAYS)
        }
        outer = {
            "state": text,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "files": digests,
            "dtypes": special,
        }
        (folder / STATE).write_text(json.dumps(outer))
    try:
        for old in checkpoint_files.folders(storage.root)[keep:]:
            if old != final:
                storage.remove(old)
    except OSError as error:
        raise NotRemoved(str(error)) from error
    return final


class NotRemoved(OSError):
    """An older checkpoint could not be removed. The new one is in place."""
