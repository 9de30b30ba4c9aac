"""Writes checkpoints, each of which is whole or not there.

A thread does so while training goes on.
"""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume import signals
from keras_conflux._extensions.resume import stored_arrays
from keras_conflux._extensions.resume.checkpoint_files import WEIGHTS
from keras_conflux._extensions.resume.compat import weight_files


class CheckpointWriter:
    """Writes into a directory that no other training writes into."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._root = directory
        self._thread = ThreadPoolExecutor(1, "conflux-checkpoint")
        self._writing: Future[str] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Makes the directory, keeps it from others, and ends the writing."""
        what = "opening the directory of the checkpoints"
        with contextlib.ExitStack() as stack:
            if process_index() == 0:
                with errors_reported_to_all(what):
                    if not _is_kept(self._root):
                        stack.enter_context(_locked(self._root))
                    remove_unfinished(self._root)
            stack.enter_context(self._thread)
            stack.callback(self.wait)
            yield

    def start(self, write: Callable[[], str]) -> None:
        """Lets the thread write. See `write`."""
        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Waits until a checkpoint is written. A full disk only warns."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            said = writing.result()
        except OSError as error:
            said = (
                f"A checkpoint could not be written: {error}. Training goes "
                "on, and the checkpoints before stay."
            )
        if said:
            warn(said)


def write(
    root: pathlib.Path,
    position: tuple[int, int],
    weights: list[weight_files.Entry],
    state: dict[str, Any],
    keep: int,
) -> str:
    """Writes a checkpoint, removes old ones, and tells if one could not go.

    The position is the number of steps done, and the epoch.
    """
    final = checkpoint_files.new_path(root, *position)
    with _new_folder(final) as folder:
        try:
            weight_files.write(weights, folder / WEIGHTS)
        except RuntimeError as error:  # h5py's, where a disk is full
            raise OSError(str(error)) from error
        arrays: stored_arrays.Arrays = {}
        told = {
            "format": checkpoint_files.FORMAT,
            "digest": checkpoint_files.digest_of(folder, WEIGHTS),
            "state": plain_values.encode(state, arrays),
        }
        stored_arrays.write(folder / checkpoint_files.STATE, told, arrays)
    try:
        for old in _replaced(root, final, keep):
            remove(old)
    except OSError as error:
        return f"An older checkpoint could not be removed: {error}."
    return ""


def _replaced(
    root: pathlib.Path, final: pathlib.Path, keep: int
) -> list[pathlib.Path]:
    """Returns former checkpoints of the same step, and those beyond `keep`."""
    found = checkpoint_files.folders(root)  # the newest first
    newest = {checkpoint_files.position_of(x)[:2]: x for x in reversed(found)}
    kept = [*newest.values()][-keep:]
    return [path for path in found if path not in (*kept, final)]


@contextlib.contextmanager
def _new_folder(final: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder, and puts it in place when its files are written."""
    aside = _hidden(final)
    remove(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in (*aside.iterdir(), aside):
            _sync(path)
        aside.rename(final)
    except BaseException:
        remove(aside)
        raise
    _sync(final.parent)


def remove(folder: pathlib.Path) -> None:
    """Removes a folder, if it is there and only has files of this package.

    It loses its name first. With some files gone, it would look damaged.
    """
    hidden = _hidden(folder)
    with contextlib.suppress(FileNotFoundError):
        if folder != hidden and _own_files(folder) is not None:
            remove(hidden)  # which an earlier process has left
            folder.rename(hidden)
        files = _own_files(hidden)
        if files is not None:
            for path in files:
                path.unlink()
            hidden.rmdir()


def remove_unfinished(root: pathlib.Path) -> None:
    """Removes folders that a killed process has left half-written."""
    for path in root.glob(".step-*"):
        remove(path)


_kept: dict[pathlib.Path, Any] = {}


def keep_from_others(root: pathlib.Path) -> None:
    """Keeps other processes from a directory until this one ends."""
    if not _is_kept(root):
        _kept[root.resolve()] = lock = _locked(root)
        lock.__enter__()


def _is_kept(root: pathlib.Path) -> bool:
    return root.resolve() in _kept and (root / ".lock").exists()  # not removed


@contextlib.contextmanager
def _locked(root: pathlib.Path) -> Iterator[None]:
    """Makes a directory of checkpoints, and keeps other processes from it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(root / ".lock", flags, 0o644)
    except OSError as error:
        raise OSError(
            f"Checkpoints cannot be written to {root}: {error}. Choose a "
            "directory that this user may write to."
        ) from error
    with open(lock, "rb+", buffering=0) as file:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"Another training writes its checkpoints to {root}. End it, "
                "or give this one another directory. If both are processes of "
                "one training, each calls `keras_conflux.initialize()` first."
            ) from None
        except OSError as error:
            raise OSError(
                error.errno,
                f"A training locks the directory of its checkpoints, and "
                f"the file system of {root} cannot ({error.strerror})"
                ". Mount it with locks, or choose another directory.",
            ) from error
        with signals.until_forked(file.close):
            yield


def _hidden(folder: pathlib.Path) -> pathlib.Path:
    """Returns the name of a folder while it is written or removed."""
    return folder.with_name(f".{folder.name.removeprefix('.')}")


def _own_files(folder: pathlib.Path) -> list[pathlib.Path] | None:
    """Returns the files of a checkpoint, `None` if it has anything else."""
    is_named = checkpoint_files.NAME.fullmatch(folder.name.removeprefix("."))
    if not is_named or folder.is_symlink() or not folder.is_dir():
        return None
    found = [*folder.iterdir()]
    names = {x.name for x in found if x.is_file() and not x.is_symlink()}
    is_own = folder.name.startswith(".") or checkpoint_files.STATE in names
    known = names <= checkpoint_files.FILES and len(names) == len(found)
    return found if is_own and known else None


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
