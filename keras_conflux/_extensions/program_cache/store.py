"""The files on disk, with a digest of their content in their names.

A file gets its name when it is whole. Files with other names stay.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import stat
import tempfile
import time

from keras_conflux._extensions.program_cache import folders

SIZE_LIMIT = 2 * 2**30
"""How many bytes the files of all stores have together at most."""

_UNFINISHED = ".keras_conflux_unfinished-"
_NAME = re.compile(rf"(?P<name>.+)\.[0-9a-f]{{40}}|{re.escape(_UNFINISHED)}\w+")


@dataclasses.dataclass(frozen=True)
class Store:
    """Files of several kinds in one folder."""

    folder: pathlib.Path

    def files(self, kind: str) -> dict[str, pathlib.Path]:
        """Returns the whole files of a kind, by name; deletes damaged ones."""
        found = {}
        for path in self._stored(kind):
            with contextlib.suppress(OSError):
                if stored_name(path.stem, path.read_bytes()) == path.name:
                    found[path.stem] = path
                else:
                    path.unlink()
        return found

    def add(self, kind: str, file: pathlib.Path) -> None:
        """Adds a copy of a file under its name, in place of a former one."""
        content = file.read_bytes()
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp("", _UNFINISHED, folder)
        try:
            with open(descriptor, "wb") as copy:
                copy.write(content)
                copy.flush()
                os.fsync(descriptor)
            target = folder / stored_name(file.name, content)
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise
        for path in self._stored(kind):
            if path.stem == file.name and path != target:
                path.unlink(missing_ok=True)

    def keep_newest(self, kind: str, count: int) -> None:
        """Deletes all files of a kind but the newest ones."""
        stored = self._stored(kind)
        for path in stored[: max(0, len(stored) - count)]:
            _delete(path, self.folder)

    def _stored(self, kind: str) -> list[pathlib.Path]:
        """Returns the files of a kind that are not being written."""
        found = _by_age(self.folder / kind)
        return [x for x in found if not x.name.startswith(_UNFINISHED)]


def prune(folder: pathlib.Path, limit: int = SIZE_LIMIT) -> None:
    """Deletes the oldest files until the others have so many bytes."""
    abandoned = time.time() - folders.ABANDONED_SECONDS
    total = 0
    for path, found in reversed(_by_age(folder).items()):
        total += found.st_size
        is_unfinished = path.name.startswith(_UNFINISHED)
        if total > limit or (is_unfinished and found.st_mtime < abandoned):
            _delete(path, folder)


def size(folder: pathlib.Path) -> int:
    """Returns how many bytes the stored files in a folder have."""
    return sum(found.st_size for found in _by_age(folder).values())


def stored_name(name: str, content: bytes) -> str:
    """Returns the name by which a file of a name and a content is stored."""
    return f"{name}.{hashlib.sha256(content).hexdigest()[:40]}"


def _by_age(folder: pathlib.Path) -> dict[pathlib.Path, os.stat_result]:
    """Returns the files written here and below, the oldest first."""
    found = {}
    walked = () if folder.is_symlink() else os.walk(folder)
    for path in (pathlib.Path(at, x) for at, _, names in walked for x in names):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if _NAME.fullmatch(path.name) and stat.S_ISREG(status.st_mode):
                found[path] = status
    return dict(sorted(found.items(), key=lambda item: item[1].st_mtime_ns))


def _delete(path: pathlib.Path, root: pathlib.Path) -> None:
    """Deletes a file, and the folders below a root that have nothing else."""
    with contextlib.suppress(OSError):
        path.unlink()
        for folder in path.parents:
            if folder == root:
                return
            folder.rmdir()  # which fails unless it is empty
