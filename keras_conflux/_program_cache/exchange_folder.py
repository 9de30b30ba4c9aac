"""The folder in which TensorFlow looks for files and leaves its own.

It belongs to one process and is empty but for the first call of a program. What
is stored is then linked into it, and what TensorFlow has written is taken out
of it. So TensorFlow meets neither damaged files nor a full disk of the store,
and functions that this package has not traced find nothing.
"""

import atexit
import contextlib
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterable
from collections.abc import Mapping

from keras_conflux._program_cache import folders
from keras_conflux._program_cache.flags import FOLDER_PREFIX

_ABANDONED_SECONDS = 24 * 3600


class ExchangeFolder:
    """Two folders, for programs and for results of autotuning."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.programs = self.folder / "programs"
        self.autotuning = self.folder / "autotuning"
        self.assert_usable()
        atexit.register(self._remove, os.getpid())

    def assert_usable(self) -> None:
        """Makes the folders again if someone has cleaned up.

        Raises:
            CacheUnavailable: If TensorFlow could not write to them.
        """
        for folder in (self.folder, self.programs, self.autotuning):
            folders.make_private(folder)
        os.utime(self.folder)
        folders.assert_room(self.folder)

    @staticmethod
    def link(folder: pathlib.Path, files: Mapping[str, pathlib.Path]) -> None:
        """Makes TensorFlow find files.

        Args:
            folder: One of the two.
            files: By the names that TensorFlow looks for.
        """
        for name, path in files.items():
            with contextlib.suppress(OSError):  # then XLA compiles it again
                (folder / name).symlink_to(path)

    @staticmethod
    def unlink(folder: pathlib.Path, names: Iterable[str]) -> None:
        """Takes back what was linked, unless it was replaced."""
        for name in names:
            with contextlib.suppress(OSError):
                if (folder / name).is_symlink():
                    (folder / name).unlink()

    @staticmethod
    def written(folder: pathlib.Path) -> list[pathlib.Path]:
        """Returns what TensorFlow has written."""
        return [
            path
            for path in folder.glob("*")
            if path.is_file() and not path.is_symlink()
        ]

    def _remove(self, process: int) -> None:
        if os.getpid() == process:  # and not a fork of it
            shutil.rmtree(self.folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    abandoned = time.time() - _ABANDONED_SECONDS
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < abandoned:
                shutil.rmtree(path)
