"""The folders of checkpoints, as they are read: damaged ones are noticed.

Nothing here needs TensorFlow, so `keras-conflux resume` is quick.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from keras_conflux._common import arguments
from keras_conflux._extensions.resume import plain_files
from keras_conflux._extensions.resume import stored_arrays
from keras_conflux._extensions.resume.plain_files import is_remote
from keras_conflux._extensions.resume.stored_arrays import Arrays
from keras_conflux._extensions.resume.stored_arrays import with_special_dtypes

WEIGHTS = "model.weights.h5"
ARRAYS = "state.npz"
STATE = "state.json"
FORMAT = 1
_URL = re.compile(r"[a-zA-Z][\w+.:-]+:/")
MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
)
"""The errors of a file that this package has not written in this way."""
LAST_STEP = 10**12 - 1
"""The largest number in the name of a folder."""
_NAME = re.compile(r"step-(\d{12})-(\d{6})")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder in which a training was saved, as `checkpoints` lists them.

    Example:
        ```python
        whole = [each for each in kc.checkpoints("runs/a") if not each.damage]
        ```
    """

    path: pathlib.Path
    """The folder; a `upath.UPath` where the directory is a URL."""
    step: int
    """How many steps had been done, in all epochs."""
    epoch: int
    """The epoch that the training was in, from 0."""
    size: int
    """The size in bytes."""
    time: float
    """When it was written, in seconds since 1970."""
    damage: str | None
    """The fault in it; `None` if it is whole."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint besides the weights."""

    path: pathlib.Path
    state: dict[str, Any]
    arrays: Arrays
    weights: pathlib.Path | None = None
    """The file of weights, in the process that reads it."""

    def is_over(self, epochs: int) -> bool:
        """Whether a training of so many epochs had ended."""
        return self.state["stopped"] or self.state["epoch"] >= epochs


def directory_of(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a directory as a path, which is a `upath.UPath` of a URL.

    Args:
        directory: A path, a URL, or a `upath.UPath`.

    Raises:
        ImportError: If the URL needs a package that is not installed.
        TypeError: If it is none of these.
        ValueError: If there is no such kind of URL, if it names no directory,
            or if it is a `Path`; if the text is empty.
    """
    arguments.assert_path(directory)
    text = str(directory)
    if not _URL.match(text):
        return pathlib.Path(directory).absolute()
    if isinstance(directory, pathlib.PurePath):
        raise ValueError(
            "A pathlib.Path cannot hold a URL, as it has one slash only. Give "
            f"the URL as a string. Received: {directory!r}"
        )
    if "::" in text or "://" not in text.rstrip("/"):
        raise ValueError(
            "Expected the URL of a directory, such as 'gs://bucket/run'. "
            f"Received: {text!r}"
        )
    try:
        from upath import UPath

        root: Any = UPath(text.rstrip("/")) if text is directory else directory
        _ = root.fs  # imports the package of the file system
    except ImportError as error:
        raise ImportError(
            "Checkpoints in a directory that is named by a URL need other "
            "packages: type `pip install universal-pathlib`, and one for the "
            f"file system, such as `gcsfs` or `s3fs` ({error}). Received: "
            f"{text!r}"
        ) from error
    return root


@contextlib.contextmanager
def os_errors(path: pathlib.Path) -> Iterator[None]:
    """Raises a URL's file system's own errors as `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if is_remote(path):
            text = f"{path}: {type(error).__name__}: {error}"
            raise OSError(text) from error
        raise


def entries(folder: Any) -> list[pathlib.Path]:
    """Returns the entries of a folder; an empty list if there is none.

    Of a URL, nothing is taken from a listing that was kept, and a folder that
    cannot be listed is not taken for empty.

    Raises:
        OSError: If it cannot be listed.
    """
    if not is_remote(folder):
        return [*folder.iterdir()] if folder.is_dir() else []
    with os_errors(folder):
        folder.fs.invalidate_cache()
        try:
            found = folder.fs.ls(folder.path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
    own = folder.path.rstrip("/")
    paths = [each.rstrip("/") for each in found]
    return [folder / p.rpartition("/")[2] for p in paths if p != own]


def checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """Returns the checkpoints in a directory, the newest first.

    All of their bytes are read, and compared with the digests that were taken
    when they were written.

    Args:
        directory: The one of `keras_conflux.Resume` or `keras_conflux.save`.

    Returns:
        A list of `Checkpoint`s; empty if there is no such directory.

    Raises:
        ImportError: If the directory is a URL that needs another package.

    Example:
        ```python
        for checkpoint in kc.checkpoints("runs/a"):
            print(checkpoint.path, checkpoint.step, checkpoint.damage)
        ```
    """
    found = []
    for path in folders(directory):
        # A training that writes there may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append(_described(path))
    return found


def _described(path: pathlib.Path) -> Checkpoint:
    try:
        read(path)
        damage = None
    except Damage as error:
        damage = str(error)
    step, epoch = position_of(path)
    files = [_stat(each) for each in entries(path)]
    if not files:  # it has gone
        raise FileNotFoundError(path)
    size = sum(each.st_size for each in files)
    modified = max((each.st_mtime for each in files), default=0)
    return Checkpoint(path, step, epoch, size, modified, damage)


def _stat(path: pathlib.Path) -> os.stat_result:
    return path.stat() if is_remote(path) else path.lstat()


class Damage(Exception):
    """A fault of a checkpoint."""


class Unreadable(Damage):
    """Why a checkpoint cannot be read now. It may be whole."""


def folders(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the folders of checkpoints, the newest first."""
    root = directory_of(directory)
    found = named_folders(root)
    if not is_remote(root):
        return found
    # The file with the digests is put last.
    return [f for f in found if any(e.name == STATE for e in entries(f))]


def named_folders(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders with names of checkpoints."""
    found = [path for path in entries(root) if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def position_of(folder: pathlib.Path) -> tuple[int, int]:
    """Returns how many steps had been done, and the epoch, by the name."""
    matched = _NAME.fullmatch(folder.name)
    assert matched is not None
    step, epoch = map(int, matched.groups())
    return step, epoch


def read(path: pathlib.Path) -> Saved:
    """Returns the contents of a folder.

    Raises:
        Damage: If it differs from the checkpoint that was written.
        ValueError: If a newer version of this package wrote it.
    """
    try:
        with os_errors(path):
            content = plain_files.read_text(path, STATE)
        outer = json.loads(content)
        text, digest, files = outer["state"], outer["sha256"], outer["files"]
        written_in, special = int(outer["format"]), dict(outer["dtypes"])
        weights = outer.get("weights", WEIGHTS)
        stored_as = outer.get("arrays", ARRAYS)
        digests = {name: files[name] for name in (weights, stored_as)}
        found = hashlib.sha256(text.encode()).hexdigest()
    except (OSError, *MALFORMED) as error:
        raise _not_read(STATE, error) from error
    if found != digest:
        raise Damage(f"{STATE} has changed since it was written")
    try:
        state = dict(json.loads(text))
    except MALFORMED as error:
        raise _not_read(STATE, error) from error
    # Digests do not cover the format in front. Former versions had it there
    # alone.
    if state.get("format", written_in) != written_in:
        raise Damage(f"{STATE} has changed since it was written")
    if written_in > FORMAT:
        raise ValueError(
            f"{path} is in format {written_in}, of a newer version of "
            f"keras-conflux; this one reads format {FORMAT}. Install the "
            "newer version."
        )
    for name, expected in digests.items():
        try:
            found = digest_of(path, name)
        except (OSError, ValueError) as error:
            raise _not_read(name, error) from error
        if found != expected:
            raise Damage(f"{name} has changed since it was written")
    try:
        with (
            os_errors(path),
            plain_files.open_file(path, stored_as) as file,
        ):
            arrays = with_special_dtypes(stored_arrays.read(file), special)
    except (OSError, *MALFORMED) as error:
        raise _not_read(stored_as, error) from error
    return Saved(path, state, arrays, path / weights)


def _not_read(name: str, error: Exception) -> Damage:
    """Returns the fault: a disk or rights, unless the file is at fault."""
    elsewhere = isinstance(error, OSError)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        elsewhere = False
    kind = Unreadable if elsewhere else Damage
    return kind(f"{name} cannot be read ({error})")


def digest_of(folder: pathlib.Path, name: str) -> str:
    """Returns the digest by which a file is known to be as it was written."""
    with os_errors(folder), plain_files.open_file(folder, name) as file:
        read: Any = file
        return hashlib.file_digest(read, "sha256").hexdigest()
