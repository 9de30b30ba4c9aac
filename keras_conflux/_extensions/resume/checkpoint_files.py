"""The folders of checkpoints, as they are read: damaged ones are noticed."""

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import re
import stat
from typing import Any

from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.agreement import gather_contents
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import arguments
from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume import stored_arrays

WEIGHTS = "model.weights.h5"
STATE = "state.npz"
FILES = {WEIGHTS, STATE}
FORMAT = 5
_URL = re.compile(r"[a-zA-Z][\w+.-]+:/")  # a `Path` has one slash of it
NAME = re.compile(r"step-(\d{12,})-(\d{6,})(?:\.(\d+))?")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder in which a training was saved, as `checkpoints` lists them.

    Example:
        ```python
        whole = [each for each in kc.checkpoints("runs/a") if not each.damage]
        ```
    """

    path: pathlib.Path
    """The folder."""
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

    def is_over(self, epochs: int) -> bool:
        """Whether a training of so many epochs had ended."""
        return self.state["stopped"] or self.state["epoch"] >= epochs


def directory_of(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a directory as a path; refuses others, such as a URL."""
    expected = 'a directory, such as "runs/a"; "." is the current one'
    arguments.assert_is(directory, str | os.PathLike, expected)
    if not str(directory):
        raise ValueError(f"Expected {expected}. Received: {directory!r}")
    if _URL.match(str(directory)):
        raise ValueError(
            "Expected a directory, as a rename puts a checkpoint in place and "
            "a lock keeps others away. Give one of this machine or of a "
            "network file system, and copy it to a bucket, as by `gcloud "
            f"storage rsync`. Received: {str(directory)!r}"
        )
    return pathlib.Path(directory).absolute()


def checkpoints(directory: str | os.PathLike[str]) -> list[Checkpoint]:
    """Returns the checkpoints in a directory, the newest first.

    All of their bytes are read, and compared with the checksums in the files.

    Args:
        directory: The one of `keras_conflux.Resume` or `keras_conflux.save`.

    Returns:
        A list of `Checkpoint`s; empty if there is no such directory.

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
    step, epoch, _ = position_of(path)
    is_folder = path.is_dir() and not path.is_symlink()
    inside = path.iterdir() if is_folder else [path]
    files = [each.lstat() for each in inside]
    if not files:  # it has gone
        raise FileNotFoundError(path)
    size = sum(each.st_size for each in files)
    modified = max(each.st_mtime for each in files)
    return Checkpoint(path, step, epoch, size, modified, damage)


class Damage(Exception):
    """A fault of a checkpoint."""


def folders(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the folders of checkpoints, the newest first."""
    root = directory_of(directory)
    listed = root.iterdir() if root.is_dir() else ()
    found = [path for path in listed if NAME.fullmatch(path.name)]
    return sorted(found, key=position_of, reverse=True)


def position_of(folder: pathlib.Path) -> tuple[int, int, int]:
    """Returns the steps done, the epoch, and how often it was saved before."""
    matched = NAME.fullmatch(folder.name)
    assert matched is not None
    step, epoch, number = map(int, matched.groups("0"))
    return step, epoch, number


def new_path(root: pathlib.Path, step: int, epoch: int) -> pathlib.Path:
    """Returns a path that comes after those of the same step and epoch."""
    name = f"step-{step:012d}-{epoch:06d}"
    places = [position_of(each) for each in folders(root)]
    before = [n for *place, n in places if place == [step, epoch]]
    return root / (f"{name}.{max(before) + 1}" if before else name)


def read(path: pathlib.Path) -> Saved:
    """Returns the contents of a folder, or raises its `Damage`."""
    if path.is_symlink():
        raise Damage("it is a link")
    try:
        with open_file(path / STATE) as file:
            told, arrays = stored_arrays.read(file)
        written_in, digest = told["format"], told["digest"]
        is_read = written_in == FORMAT
        state = plain_values.decode(told["state"], arrays) if is_read else {}
    except Exception as error:  # what parsers raise is in no list of theirs
        raise Damage(f"{STATE} cannot be read ({error})") from error
    if not is_read:
        raise ValueError(
            f"{path} is in format {written_in}, of another version of "
            f"keras-conflux; this one reads format {FORMAT}. Install the "
            "version that wrote it."
        )
    try:
        found = digest_of(path, WEIGHTS)
    except (OSError, ValueError) as error:
        raise Damage(f"{WEIGHTS} cannot be read ({error})") from error
    if found != digest:
        raise Damage(f"{WEIGHTS} has changed since it was written")
    return Saved(path, state)


def read_newest(directory: str | os.PathLike[str]) -> Saved | None:
    """Returns the newest checkpoint that is whole; warns of those that are not.

    The first process reads it. The others may have no access to its files.
    """
    what = "reading a checkpoint"
    with errors_reported_to_all(what):
        saved = _newest(directory) if process_index() == 0 else None
        own = None if saved is None else (str(saved.path), saved.state)
        first, *_ = gathered(what, own)
    if process_index() == 0 or first is None:
        return saved
    return Saved(directory_of(first[0]), first[1])


def _newest(directory: str | os.PathLike[str]) -> Saved | None:
    passed = set()
    # Listed again each time: a training that writes there removes old ones.
    while left := [path for path in folders(directory) if path not in passed]:
        passed.add(left[0])
        try:
            return read(left[0])
        except Damage as error:
            if left[0] not in folders(directory):
                continue
            before = "The one before it is used."
            warn(
                f"The checkpoint {left[0]} is not used: {error}. "
                f"{before if left[1:] else 'There is no other.'}"
            )
    return None


def gathered(what: str, own: Any) -> list[Any]:
    """Returns the plain values of all processes, in their order."""
    if process_count() == 1:
        return [own]
    assert_same_place(what)
    contents = gather_contents(plain_values.to_bytes(own))
    return [*map(plain_values.from_bytes, contents)]


def digest_of(folder: pathlib.Path, name: str) -> str:
    """Returns the digest by which a file is known to be as it was written."""
    with open_file(folder / name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_file(path: pathlib.Path) -> io.BufferedReader:
    """Opens a file of a checkpoint for reading: a regular one, and no link."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no regular file")
    return open(descriptor, "rb")
