"""The files of a checkpoint in a folder of this machine.

Only files that are known by name and content are deleted. A folder that
has anything else stays as it is.
"""

import hashlib
import json
import os
import pathlib
import re

from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import plain_files
from keras_conflux._extensions.resume.checkpoint_files import ARRAYS
from keras_conflux._extensions.resume.checkpoint_files import STATE
from keras_conflux._extensions.resume.checkpoint_files import WEIGHTS

UNFINISHED = ".unfinished"
"""A file that is there while the others are written. It holds the name that the
folder will have."""

_NAME = re.compile(r"\.?(step-\d{12}-\d{6})(\.former)?(\.old)?")
_BLOCK = 4096
_BLOCKS = 64


def is_aside(folder: pathlib.Path) -> bool:
    """Whether a folder is named like one that is written or removed."""
    is_hidden = folder.name.startswith(".")
    return is_hidden and _NAME.fullmatch(folder.name) is not None


def in_folder(folder: pathlib.Path) -> list[pathlib.Path] | None:
    """Returns the files of a checkpoint.

    They can be deleted in this order: the rest is still known.

    Returns:
        A list; `None` if the folder has anything else, or is none.
    """
    matched = _NAME.fullmatch(folder.name)
    if matched is None or folder.is_symlink() or not folder.is_dir():
        return None
    found = {path.name for path in folder.iterdir()}
    if UNFINISHED in found:
        known = _being_written(folder, matched[1])
    else:
        known = _as_written(folder)
    if found - set(known):
        return None
    return [folder / name for name in known if name in found]


def sample(folder: pathlib.Path, name: str) -> str:
    """Returns a digest of a file's length and of blocks from all of it.

    It tells other weights of one model apart, and takes no time for large ones.
    """
    with plain_files.open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for start in range(0, size, max(_BLOCK, size // _BLOCKS)):
            file.seek(start)
            digest.update(file.read(_BLOCK))
        file.seek(max(0, size - _BLOCK))
        digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _being_written(folder: pathlib.Path, name: str) -> list[str]:
    names = [WEIGHTS, ARRAYS, STATE, UNFINISHED]
    try:
        if plain_files.read_text(folder, UNFINISHED) != name:
            return []
    except (OSError, ValueError):
        return []
    return [each for each in names if _is_file(folder / each)]


def _as_written(folder: pathlib.Path) -> list[str]:
    try:
        outer = json.loads(plain_files.read_text(folder, STATE))
        digest = hashlib.sha256(outer["state"].encode()).hexdigest()
        if digest != outer["sha256"]:
            return []
        samples = outer["samples"].items()
        known = [
            name
            for name, expected in samples
            if _is_file(folder / name) and sample(folder, name) == expected
        ]
    except (OSError, *checkpoint_files.MALFORMED):
        return []
    return [*known, STATE]


def _is_file(path: pathlib.Path) -> bool:
    return path.is_file() and not path.is_symlink()
