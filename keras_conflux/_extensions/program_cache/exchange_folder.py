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
import tempfile
import time
from collections.abc import Iterable
from collections.abc import Mapping

from keras_conflux._extensions.program_cache import folders
from keras_conflux._extensions.program_cache.flags import FOLDER_PREFIX

_ABANDONED_SECONDS = 24 * 3600


class ExchangeFolder:
    """A folder of this process for the executables of TensorFlow."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.assert_usable()
        atexit.register(self._remove, os.getpid())

    def assert_usable(self) -> None:
        """Makes the folder again if someone has cleaned up.

        Raises:
            CacheUnavailable: If TensorFlow could not write to it.
        """
        folders.make_private(self.folder)
        os.utime(self.folder)
        folders.assert_room(self.folder)

    def link(self, files: Mapping[str, pathlib.Path]) -> None:
        """Makes TensorFlow find files.

        Args:
            files: The files, by the names that TensorFlow looks for.
        """
        for name, path in files.items():
            with contextlib.suppress(OSError):  # then XLA compiles it again
                (self.folder / name).symlink_to(path)

    def unlink(self, names: Iterable[str]) -> None:
        """Takes links back, unless they were replaced."""
        for name in names:
            with contextlib.suppress(OSError):
                if (self.folder / name).is_symlink():
                    (self.folder / name).unlink()

    def written(self) -> list[pathlib.Path]:
        """Returns the files that TensorFlow has written."""
        return [
            path
            for path in self.folder.glob("*")
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
                shutil.rmtree(path)  # which follows no links
