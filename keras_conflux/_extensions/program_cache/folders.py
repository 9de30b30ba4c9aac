"""Where programs are kept, and whether a folder is safe for it."""

import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Mapping

VARIABLE = "KERAS_CONFLUX_CACHE"
"""The environment variable of the folder of programs; `0` keeps nothing."""
_OWN = "keras_conflux"
"""The name of the folder of programs. Nothing outside of it is touched."""
MINIMUM_FREE = 2**30
"""How many bytes must be free. A program takes tens of megabytes."""

ABANDONED_SECONDS = 24 * 3600
"""After this time nobody writes any more to a file that is not whole."""


class CacheUnavailable(Exception):
    """Programs cannot be kept here, or are not to be, as is expected."""

    def __init__(self, reason: str, *, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_expected = is_expected


def chosen(environ: Mapping[str, str]) -> pathlib.Path:
    """Returns the folder of programs, which is in one that the user names."""
    given = environ.get(VARIABLE)
    if given == "0":
        raise CacheUnavailable(f"{VARIABLE} is 0", is_expected=True)
    try:
        if given:
            return pathlib.Path(given).expanduser().absolute() / _OWN
        shared = pathlib.Path(environ.get("XDG_CACHE_HOME", ""))
        if not shared.is_absolute():  # as the specification demands
            shared = pathlib.Path.home() / ".cache"
        return shared / _OWN
    except RuntimeError as error:
        raise CacheUnavailable(f"{error}") from error


def make_private(folder: pathlib.Path, may_be_link: bool = False) -> None:
    """Makes a folder that only this user can write to, unless it is there.

    Files there are run as code. A link will do where the user has named it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat(follow_symlinks=may_be_link)
    except OSError as error:
        raise CacheUnavailable(f"{folder}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise CacheUnavailable(
            f"{folder} is a link, and files are kept in a folder only"
        )
    if found.st_uid != os.geteuid():
        raise CacheUnavailable(
            f"{folder} belongs to user {found.st_uid}, and this process runs "
            f"as {os.geteuid()}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheUnavailable(
            f"others may write to {folder}; type `chmod go-w {folder}`"
        )


def assert_room(folder: pathlib.Path, needed: int = MINIMUM_FREE) -> None:
    """Raises unless files can be written to a folder."""
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**16))
    except OSError as error:
        raise CacheUnavailable(f"{folder}: {error.strerror}") from error
    if free < needed:
        raise CacheUnavailable(
            f"{folder} has {free // 2**20} MiB free, and "
            f"{needed // 2**20} are needed"
        )
