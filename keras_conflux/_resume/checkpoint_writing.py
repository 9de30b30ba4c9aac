"""Writes the folders of checkpoints: they are whole, or not there."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from keras_conflux._common.stored_arrays import Arrays
from keras_conflux._common.stored_arrays import without_special_dtypes
from keras_conflux._compat import weight_files
from keras_conflux._resume import checkpoint_files
from keras_conflux._resume.checkpoint_files import ARRAYS
from keras_conflux._resume.checkpoint_files import FORMAT
from keras_conflux._resume.checkpoint_files import STATE
from keras_conflux._resume.checkpoint_files import WEIGHTS


def write(
    directory: str | os.PathLike[str],
    position: tuple[int, int],
    weights: list[weight_files.Entry],
    state: dict[str, Any],
    arrays: Arrays,
    keep: int,
) -> pathlib.Path:
    """Writes a checkpoint, and removes those that are too old.

    Until the last moment, it has a name that nobody reads.

    Args:
        directory: Is made if it is not there.
        position: How many steps are done, and the epoch.
        weights: What Keras' file of weights is to hold.
        state: Anything that JSON can hold.
        arrays: Those that `state` refers to.
        keep: How many checkpoints stay.

    Returns:
        Its path.

    Raises:
        OSError: If it cannot be written, as where a disk is full. Nothing
            remains of it then.
    """
    step, epoch = position
    root = checkpoint_files.local_directory(directory)
    final = root / f"step-{step:012d}-{epoch:06d}"
    aside = final.with_name(f".{final.name}")
    _remove(aside)
    aside.mkdir(parents=True)
    try:
        weight_files.write(weights, aside / WEIGHTS)
        stored, special = without_special_dtypes(arrays)
        np.savez(aside / ARRAYS, **stored)  # pyright: ignore
        text = json.dumps(state)
        outer = {
            "format": FORMAT,
            "state": text,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "files": {n: _settled(aside / n) for n in (WEIGHTS, ARRAYS)},
            "dtypes": special,
        }
        (aside / STATE).write_text(json.dumps(outer))
        _settled(aside / STATE)
        _sync(aside)
        _remove(final)
        aside.rename(final)
        _sync(final.parent)
    except BaseException as error:
        _remove(aside)
        if isinstance(error, RuntimeError):  # h5py's, where a disk is full
            raise OSError(str(error)) from error
        raise
    for old in checkpoint_files.folders(directory)[keep:]:
        if old != final:
            _remove(old)
    return final


def remove_unfinished(directory: str | os.PathLike[str]) -> None:
    """Removes what a process that was killed has left half-written."""
    for path in pathlib.Path(directory).glob(".step-*"):
        _remove(path)


def put_aside(path: pathlib.Path) -> pathlib.Path:
    """Gives a damaged checkpoint a name by which it counts no more.

    Returns:
        Where it is; where it was, if this process may not rename it.
    """
    aside = path.with_name(f"damaged-{path.name}")
    try:
        _remove(aside)
        return path.rename(aside)
    except OSError:
        return path


def _settled(path: pathlib.Path) -> str:
    """Waits until a file is on the disk, and returns its digest."""
    _sync(path)
    return checkpoint_files.digest_of(path)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: pathlib.Path) -> None:
    """Removes a folder, if it is there.

    It loses its name first. With some of its files gone, it would look like a
    checkpoint that has been damaged.
    """
    nameless = path.with_name(f".{path.name.lstrip('.')}.old")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(nameless)
    with contextlib.suppress(FileNotFoundError):
        path.rename(nameless)
        shutil.rmtree(nameless)
