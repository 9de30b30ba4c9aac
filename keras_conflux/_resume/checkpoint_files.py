"""The folders of checkpoints: whole or not there, damaged ones are noticed."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

import numpy as np

from keras_conflux._common.plain_values import Arrays
from keras_conflux._common.plain_values import with_special_dtypes
from keras_conflux._common.plain_values import without_special_dtypes
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import weight_files

WEIGHTS = "model.weights.h5"
_ARRAYS = "state.npz"
_STATE = "state.json"
_FORMAT = 1
_URL = re.compile(r"[a-zA-Z][\w+.-]+:/")
"""A `Path` of a URL has one slash only."""
_NAME = re.compile(r"step-(\d{12})-(\d{6})")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder in which a training was saved, as `checkpoints` lists them.

    Example:
        ```python
        whole = [each for each in kc.checkpoints("runs/a") if not each.damage]
        ```
    """

    path: pathlib.Path
    """The folder."""
    step: int
    """How many steps had been done, in all epochs."""
    epoch: int
    """The epoch that the training was in, from 0."""
    size: int
    """In bytes."""
    time: float
    """When it was written, in seconds since 1970."""
    damage: str | None
    """What is wrong with it; `None` if it is whole."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint holds besides the weights."""

    path: pathlib.Path
    state: dict[str, Any]
    arrays: Arrays


def local_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a directory that this process reaches by its path.

    Raises:
        ValueError: If it is named by a URL.
    """
    if _URL.match(str(directory)):
        raise ValueError(
            "Checkpoints are written to a directory of this machine, because "
            "they are put in place by a rename of a folder. Mount the storage "
            f"and give the path of the mount. Received: {str(directory)!r}"
        )
    return pathlib.Path(directory).absolute()


def checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """Returns the checkpoints in a directory, the newest first.

    All of their bytes are read, and compared with the digests that were taken
    when they were written.

    Args:
        directory: Of `keras_conflux.Resume` or `keras_conflux.save`.

    Returns:
        A list of `Checkpoint`s; empty if there is no such directory.

    Raises:
        ValueError: If the directory is a URL.

    Example:
        ```python
        for checkpoint in kc.checkpoints("runs/a"):
            print(checkpoint.path, checkpoint.step, checkpoint.damage)
        ```
    """
    found = []
    for path in _folders(directory):
        try:
            _read(path)
            damage = None
        except _Damage as error:
            damage = str(error)
        matched = _NAME.fullmatch(path.name)
        assert matched is not None
        sizes = [each.stat().st_size for each in path.iterdir()]
        step, epoch = map(int, matched.groups())
        modified = path.stat().st_mtime
        found.append(
            Checkpoint(path, step, epoch, sum(sizes), modified, damage)
        )
    return found


def read_newest(directory: str | os.PathLike[str]) -> Saved | None:
    """Returns the newest checkpoint that is whole; warns of those that are not.

    Raises:
        ValueError: If a newer version of this package wrote it.
    """
    for path in _folders(directory):
        try:
            return _read(path)
        except _Damage as error:
            warn(
                f"The checkpoint {path} is not used: {error}. The one before "
                "it is."
            )
    return None


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
    final = local_directory(directory) / f"step-{step:012d}-{epoch:06d}"
    aside = final.with_name(f".{final.name}")
    _remove(aside)
    aside.mkdir(parents=True)
    try:
        weight_files.write(weights, aside / WEIGHTS)
        stored, special = without_special_dtypes(arrays)
        np.savez(aside / _ARRAYS, **stored)  # pyright: ignore
        text = json.dumps(state)
        outer = {
            "format": _FORMAT,
            "state": text,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "files": {n: _settled(aside / n) for n in (WEIGHTS, _ARRAYS)},
            "dtypes": special,
        }
        (aside / _STATE).write_text(json.dumps(outer))
        _settled(aside / _STATE)
        _sync(aside)
        _remove(final)
        aside.rename(final)
        _sync(final.parent)
    except BaseException as error:
        _remove(aside)
        if isinstance(error, RuntimeError):  # h5py's, where a disk is full
            raise OSError(str(error)) from error
        raise
    for old in _folders(directory)[keep:]:
        _remove(old)
    return final


def remove_unfinished(directory: str | os.PathLike[str]) -> None:
    """Removes what a process that was killed has left half-written."""
    for path in pathlib.Path(directory).glob(".step-*"):
        _remove(path)


class _Damage(Exception):
    """What is wrong with a checkpoint."""


def _folders(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the folders of checkpoints, the newest first."""
    root = local_directory(directory)
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def _read(path: pathlib.Path) -> Saved:
    try:
        outer = json.loads((path / _STATE).read_text())
        text, digest, files = outer["state"], outer["sha256"], outer["files"]
        written_in, special = outer["format"], outer["dtypes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damage(f"{_STATE} cannot be read ({error})") from error
    if written_in > _FORMAT:
        raise ValueError(
            f"{path} is in format {written_in}, of a newer version of "
            f"keras-conflux; this one reads format {_FORMAT}. Upgrade it: "
            "pip install --upgrade keras-conflux"
        )
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise _Damage(f"{_STATE} has changed since it was written")
    for name, expected in files.items():
        try:
            found = _digest(path / name)
        except OSError as error:
            raise _Damage(f"{name} cannot be read ({error})") from error
        if found != expected:
            raise _Damage(f"{name} has changed since it was written")
    with np.load(path / _ARRAYS, allow_pickle=False) as stored:
        arrays = with_special_dtypes(dict(stored), special)
    return Saved(path, json.loads(text), arrays)


def _settled(path: pathlib.Path) -> str:
    """Waits until a file is on the disk, and returns its digest."""
    _sync(path)
    return _digest(path)


def _digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
