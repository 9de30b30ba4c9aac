"""The directory of checkpoints, of which each is whole or not there."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import signals


@contextlib.contextmanager
def new_folder(final: pathlib.Path) -> Iterator[pathlib.Path]:
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

    It loses its name first. With some of its files gone, it would look like
    a checkpoint that has been damaged.
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


@contextlib.contextmanager
def locked(root: pathlib.Path) -> Iterator[None]:
    """Makes a directory of checkpoints, and keeps other processes from it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(root / ".lock", flags, 0o644)
    except OSError as error:
        raise OSError(
            f"Checkpoints cannot be written to {root}: {error}. Pass "
            "`Resume` a directory that this user may write to."
        ) from error
    with open(lock, "rb+", buffering=0) as file:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"Another training writes its checkpoints to {root}. End it, "
                "or give this one another directory."
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
