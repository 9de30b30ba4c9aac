"""The folder in which TensorFlow looks for files and leaves its own.

It belongs to one process and is empty but for the first call of a program.
Stored files are then linked into it, and TensorFlow's new files are taken out
of it. So TensorFlow meets neither damaged files nor a full disk of the store,
and functions that this package has not traced find nothing.
"""

import atexit
import contextlib
import os
import pathlib
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from collections.abc import Mapping

from keras_conflux._extensions.program_cache import folders
from keras_conflux._extensions.program_cache.flags import FOLDER_PREFIX
from keras_conflux._extensions.program_cache.folders import CacheUnavailable

_ABANDONED_SECONDS = 24 * 3600
_MARKER = ".made_by_keras_conflux"
"""A file by which such a folder is known; it holds the folder's name."""
_PROGRAMS = "programs"
_AUTOTUNING = "autotuning"


class ExchangeFolder:
    """Two folders, for programs and for results of autotuning."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.programs = self.folder / _PROGRAMS
        self.autotuning = self.folder / _AUTOTUNING
        self.assert_usable()
        atexit.register(self._remove, os.getpid())

    def assert_usable(self) -> None:
        """Makes the folders again if someone has cleaned up.

        Raises:
            CacheUnavailable: If TensorFlow could not write to them.
        """
        for folder in (self.folder, self.programs, self.autotuning):
            folders.make_private(folder)
        _mark(self.folder)
        os.utime(self.folder)
        folders.assert_room(self.folder)

    @staticmethod
    def link(folder: pathlib.Path, files: Mapping[str, pathlib.Path]) -> None:
        """Makes TensorFlow find files.

        Args:
            folder: One of the two.
            files: The files, by the names that TensorFlow looks for.
        """
        for name, path in files.items():
            with contextlib.suppress(OSError):  # then XLA compiles it again
                (folder / name).symlink_to(path)

    @staticmethod
    def unlink(folder: pathlib.Path, names: Iterable[str]) -> None:
        """Takes links back, unless they were replaced."""
        for name in names:
            with contextlib.suppress(OSError):
                if (folder / name).is_symlink():
                    (folder / name).unlink()

    @staticmethod
    def written(folder: pathlib.Path) -> list[pathlib.Path]:
        """Returns the files that TensorFlow has written."""
        return [
            path
            for path in folder.glob("*")
            if path.is_file() and not path.is_symlink()
        ]

    def _remove(self, process: int) -> None:
        if os.getpid() == process:  # and not a fork of it
            _remove(self.folder)


def _mark(folder: pathlib.Path) -> None:
    """Makes a folder known as one of this package.

    Raises:
        CacheUnavailable: If nothing can be written there.
    """
    marker = folder / _MARKER
    try:
        with contextlib.suppress(FileExistsError), marker.open("x") as file:
            file.write(folder.name)
    except OSError as error:
        raise CacheUnavailable(f"{marker}: {error.strerror}") from error


def _is_marked(folder: pathlib.Path) -> bool:
    marker = folder / _MARKER
    try:
        is_file = stat.S_ISREG(marker.lstat().st_mode)
        return is_file and marker.read_text() == folder.name
    except (OSError, ValueError):
        return False


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder of this package, unless others have put files there."""
    if folder.is_symlink() or not _is_marked(folder):
        return
    for each in (folder / _PROGRAMS, folder / _AUTOTUNING):
        shutil.rmtree(each, ignore_errors=True)  # which follows no links
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [_MARKER]:
            (folder / _MARKER).unlink()
            folder.rmdir()


def _remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    abandoned = time.time() - _ABANDONED_SECONDS
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < abandoned:
                _remove(path)
