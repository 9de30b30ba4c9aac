"""The files on disk, each with a checksum in its name.

A file is written under another name, and renamed when it is whole. So a process
that is killed leaves nothing behind that looks whole, and several processes
can write at once.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable

SIZE_LIMIT = 2 * 2**30
"""How many bytes the files of all stores have together at most."""

_ABANDONED_SECONDS = 24 * 3600
"""After this time nobody writes any more to a file that is not whole."""


class Store:
    """Files of several kinds in one folder.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def files(self, kind: str) -> dict[str, pathlib.Path]:
        """Returns the whole files of a kind, by the names they were added by.

        What is damaged is deleted.
        """
        found = {}
        for path in _by_age((self.folder / kind).glob("*.*")):
            name, _, checksum = path.name.rpartition(".")
            if not name:  # it is being written
                continue
            with contextlib.suppress(OSError):
                if _checksum(path) == checksum:
                    found[name] = path
                else:
                    path.unlink()
        return found

    def add(self, kind: str, file: pathlib.Path) -> None:
        """Adds a copy of a file under its own name, in place of a former one.

        Raises:
            OSError: If it cannot be written.
        """
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes()
        target = folder / f"{file.name}.{zlib.crc32(content):08x}"
        descriptor, unfinished = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with open(descriptor, "wb") as copy:
                copy.write(content)
                copy.flush()
                os.fsync(descriptor)
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise
        with contextlib.suppress(FileNotFoundError):
            os.utime(target)  # it is as old as its name, not as its content
        same = _by_age(p for p in folder.iterdir() if p.stem == file.name)
        # What follows, or has taken its place, is of another process.
        for path in same[: same.index(target)] if target in same else []:
            path.unlink(missing_ok=True)

    def keep_newest(self, kind: str, count: int) -> None:
        """Deletes all files of a kind but the newest ones."""
        for path in _by_age((self.folder / kind).glob("*.*"))[:-count]:
            with contextlib.suppress(OSError):
                path.unlink()

    def mark_used(self, kind: str) -> None:
        """Makes the files of a kind the last that `prune` deletes."""
        for path in _by_age((self.folder / kind).glob("*.*")):
            with contextlib.suppress(OSError):
                os.utime(path)

    def remove(self, kind: str) -> None:
        """Deletes the files of a kind."""
        shutil.rmtree(self.folder / kind, ignore_errors=True)


def prune(folder: pathlib.Path, limit: int = SIZE_LIMIT) -> None:
    """Deletes the oldest files until the others fit.

    Args:
        folder: Has all stores.
        limit: How many bytes they may have.
    """
    abandoned = time.time() - _ABANDONED_SECONDS
    total = 0
    for path in reversed(_by_age(folder.rglob("*"))):
        with contextlib.suppress(OSError):
            found = path.stat()
            total += found.st_size
            unfinished = path.name.startswith(".")
            if total > limit or (unfinished and found.st_mtime < abandoned):
                path.unlink()
    for path in sorted(folder.rglob("*/"), reverse=True):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < abandoned:
                path.rmdir()  # which fails unless it is empty


def size(folder: pathlib.Path) -> int:
    """Returns how many bytes the files in a folder have."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _by_age(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the files among paths, the oldest first."""
    ages = {}
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_file():
                ages[path] = path.stat().st_mtime_ns
    return sorted(ages, key=ages.__getitem__)


def _checksum(path: pathlib.Path) -> str:
    return f"{zlib.crc32(path.read_bytes()):08x}"
