"""The folder where TensorFlow looks for files, and the flags that name it.

It belongs to one process, and has files while a program is first called.
"""

import atexit
import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import MutableMapping

from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.program_cache import folders

FOLDER_PREFIX = "keras_conflux_exchange-"
"""How the folders begin that this package names in flags."""
_TENSORFLOW = "TF_XLA_FLAGS"
_PREFIX = "--tf_xla_persistent_cache_prefix=keras_conflux"
_DEVICE_TYPES = "--tf_xla_persistent_cache_device_types"
_PROGRAMS = "--tf_xla_persistent_cache_directory"
_OURS = re.compile(rf' ?{_PREFIX} {_DEVICE_TYPES}=\w+ {_PROGRAMS}="[^"]*"')


class ExchangeFolder:
    """A folder of this process for the executables of TensorFlow."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.assert_usable()
        atexit.register(self._remove, os.getpid())

    def assert_usable(self) -> None:
        """Makes the folder again if someone has cleaned up."""
        folders.make_private(self.folder)
        os.utime(self.folder)
        folders.assert_room(self.folder)

    def link(self, files: Mapping[str, pathlib.Path]) -> None:
        """Makes TensorFlow find files, by the names that it looks for."""
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
        files = filter(pathlib.Path.is_file, self.folder.glob("*"))
        return [path for path in files if not path.is_symlink()]

    def _remove(self, process: int) -> None:
        if os.getpid() == process:  # and not a fork of it
            shutil.rmtree(self.folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    abandoned = time.time() - folders.ABANDONED_SECONDS
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < abandoned:
                shutil.rmtree(path)  # which follows no links


def assert_no_flags(environ: MutableMapping[str, str]) -> None:
    """Raises if the user's own flags leave none to be added."""
    given = environ.get(_TENSORFLOW, "").strip()
    if given and not given.startswith("-"):
        raise folders.CacheUnavailable(
            f"{_TENSORFLOW} names a file of flags, to which none can be added"
        )
    if "tf_xla_persistent_cache" in given:
        raise folders.CacheUnavailable(
            f"{_TENSORFLOW} names a cache of its own", is_expected=True
        )


def set_flags(
    environ: MutableMapping[str, str], folder: pathlib.Path, device_type: str
) -> None:
    """Makes TensorFlow look for programs in a folder, and write them there."""
    flags = f'{_PREFIX} {_DEVICE_TYPES}={device_type} {_PROGRAMS}="{folder}"'
    xla_flags.append(environ, _TENSORFLOW, flags)


def remove_flags(environ: MutableMapping[str, str]) -> None:
    """Removes this package's flags, also a parent process' flags."""
    xla_flags.take_out(environ, _TENSORFLOW, _OURS)
