"""Opens the files of a folder that others may have filled.

A file that is read is a regular one that lies in the folder itself. All files
of checkpoints are opened here.
"""

import errno
import os
import pathlib
import stat
from typing import BinaryIO

_NO_FILES = (errno.ELOOP, errno.ENXIO)
"""The errors of links that are not followed, and of sockets."""


class StrangeFileError(ValueError):
    """Something that this package has not written in this way."""


def open_file(folder: pathlib.Path, name: object) -> BinaryIO:
    """Opens a file of a folder for reading. Others may tell its name."""
    if not isinstance(name, str) or not _is_plain(name):
        raise StrangeFileError(f"{name!r} is not the name of a file there")
    path = folder / name
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _NO_FILES:
            raise StrangeFileError(f"{path} is a link or a socket") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StrangeFileError(f"{path} is no regular file")
    return open(descriptor, "rb")


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
