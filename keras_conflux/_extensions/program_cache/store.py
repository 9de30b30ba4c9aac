"""The files on disk, known by their names and their contents.

The name of a file has a digest of its beginning and a checksum of all of it.
Only a file that begins as its name says was written here, so no other is read,
counted or deleted, and links are not followed: other files in the folder stay.
A file that begins so and has another checksum is damaged.

A file is written under another name, and renamed when it is whole. So a process
that is killed leaves nothing behind that looks whole, and several processes
can write at once.
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import pathlib
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable
from collections.abc import Iterator

SIZE_LIMIT = 2 * 2**30
"""How many bytes the files of all stores have together at most."""

_ABANDONED_SECONDS = 24 * 3600
"""After this time nobody writes any more to a file that is not whole."""

_BEGINNING = 4096
"""How many bytes tell whether a file was written here."""

_NAME = re.compile(
    r"(?P<unfinished>\.)?(?P<name>.+)"
    r"\.(?P<digest>[0-9a-f]{32})(?P<checksum>[0-9a-f]{8})"
    r"(?(unfinished)\.\w+)"
)


class Store:
    """Files of several kinds in one folder.

    Args:
        folder: The folder of the files.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def files(self, kind: str) -> dict[str, pathlib.Path]:
        """Returns the whole files of a kind, by the names they were added by.

        Damaged files are deleted.
        """
        found = {}
        for each in self._kept(kind):
            with contextlib.suppress(OSError):
                if _checksum(each.path.read_bytes()) == each.checksum:
                    found[each.name] = each.path
                else:
                    each.path.unlink()
        return found

    def add(self, kind: str, file: pathlib.Path) -> None:
        """Adds a copy of a file under its own name, in place of a former one.

        Raises:
            OSError: If it cannot be written, or another file has its place.
        """
        content = file.read_bytes()
        target = self.folder / kind / stored_name(file.name, content)
        descriptor, unfinished = self._new_file(kind, f".{target.name}.")
        try:
            with open(descriptor, "wb") as copy:
                copy.write(content)
                copy.flush()
                os.fsync(descriptor)
            if os.path.lexists(target) and _kept(target) is None:
                raise FileExistsError(errno.EEXIST, f"{target} is another file")
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise
        with contextlib.suppress(FileNotFoundError):
            os.utime(target)  # it is as old as its name, not as its content
        same = [e.path for e in self._kept(kind) if e.name == file.name]
        # Files that follow, or have taken its place, are of another process.
        for path in same[: same.index(target)] if target in same else []:
            path.unlink(missing_ok=True)

    def keep_newest(self, kind: str, count: int) -> None:
        """Deletes all files of a kind but the newest ones."""
        for each in self._kept(kind)[:-count]:
            _delete(each, self.folder)

    def mark_used(self, kind: str) -> None:
        """Makes the files of a kind the last that `prune` deletes."""
        for each in self._kept(kind):
            with contextlib.suppress(OSError):
                os.utime(each.path)

    def remove(self, kind: str) -> None:
        """Deletes the files of a kind."""
        for each in self._kept(kind):
            _delete(each, self.folder)

    def _kept(self, kind: str) -> list["_Kept"]:
        """Returns the files of a kind that are not being written."""
        if any(each.is_symlink() for each in self._folders(kind)):
            return []
        found = _by_age((self.folder / kind).glob("*"))
        return [each for each in found if not each.is_unfinished]

    def _folders(self, kind: str) -> list[pathlib.Path]:
        """Returns the folders down to the folder of a kind."""
        folder = self.folder / kind
        below = [p for p in folder.parents if p.is_relative_to(self.folder)]
        return [*reversed(below), folder]

    def _new_file(self, kind: str, prefix: str) -> tuple[int, str]:
        """Makes an empty file, and returns its descriptor and its path."""
        try:
            return self._new_file_once(kind, prefix)
        except FileNotFoundError:  # another process has emptied the folder
            return self._new_file_once(kind, prefix)

    def _new_file_once(self, kind: str, prefix: str) -> tuple[int, str]:
        for folder in self._folders(kind):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a link")
        return tempfile.mkstemp(dir=self.folder / kind, prefix=prefix)


def prune(folder: pathlib.Path, limit: int = SIZE_LIMIT) -> None:
    """Deletes the oldest files until the others fit.

    Args:
        folder: The folder of all stores.
        limit: The number of bytes that they may have.
    """
    abandoned = time.time_ns() - _ABANDONED_SECONDS * 10**9
    total = 0
    for each in reversed(_by_age(_below(folder))):
        total += each.size
        if total > limit or (each.is_unfinished and each.changed < abandoned):
            _delete(each, folder)


def size(folder: pathlib.Path) -> int:
    """Returns how many bytes the stored files in a folder have."""
    return sum(each.size for each in _by_age(_below(folder)))


def stored_name(name: str, content: bytes) -> str:
    """Returns the name by which a file is stored.

    Args:
        name: The name by which it was added.
        content: Its content.
    """
    beginning = _digest(name, content[:_BEGINNING])
    return f"{name}.{beginning}{_checksum(content)}"


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A file that was written here."""

    path: pathlib.Path
    name: str
    """The name by which it was added."""
    checksum: str
    is_unfinished: bool
    size: int
    changed: int


def _kept(path: pathlib.Path) -> _Kept | None:
    """Returns the facts about a file; `None` if it was not written here."""
    matched = _NAME.fullmatch(path.name)
    if matched is None:
        return None
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return None
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING)
    except OSError:
        return None
    if _digest(matched["name"], beginning) != matched["digest"]:
        return None
    return _Kept(
        path,
        matched["name"],
        matched["checksum"],
        matched["unfinished"] is not None,
        found.st_size,
        found.st_mtime_ns,
    )


def _below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files in a folder and in those below, through no link."""
    if not folder.is_symlink():
        for found, _, names in os.walk(folder, followlinks=False):
            yield from (pathlib.Path(found, name) for name in names)


def _by_age(paths: Iterable[pathlib.Path]) -> list[_Kept]:
    """Returns the files that were written here, the oldest first."""
    found = (_kept(path) for path in paths)
    kept = (each for each in found if each is not None)
    return sorted(kept, key=lambda each: each.changed)


def _delete(kept: _Kept, root: pathlib.Path) -> None:
    """Deletes a file, and the folders that have nothing else.

    Args:
        kept: The file.
        root: A folder that stays.
    """
    with contextlib.suppress(OSError):
        kept.path.unlink()
        for folder in kept.path.parents:
            if folder == root:
                return
            folder.rmdir()  # which fails unless it is empty


def _digest(name: str, beginning: bytes) -> str:
    text = f"keras-conflux program cache\0{name}\0".encode()
    return hashlib.sha256(text + beginning).hexdigest()[:32]


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"
