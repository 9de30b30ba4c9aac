"""Where checkpoints lie: a directory of this machine, or one with a URL.

A checkpoint is whole or not there. On this machine its folder is renamed when
all files are on the disk. A folder that has files of others is not removed.
Elsewhere folders have no renames that happen at
once, but each file is put in place at once. So the file that has the digests of
the others is put last, and taken away first.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import pathlib
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import forks
from keras_conflux._extensions.resume import own_files
from keras_conflux._extensions.resume import plain_files
from keras_conflux._extensions.resume.checkpoint_files import ARRAYS
from keras_conflux._extensions.resume.checkpoint_files import STATE
from keras_conflux._extensions.resume.checkpoint_files import WEIGHTS
from keras_conflux._extensions.resume.checkpoint_files import entries
from keras_conflux._extensions.resume.checkpoint_files import os_errors

_LOCK = ".lock"
_LOCKED = re.compile(rb"\d+ on [^\n]*")
"""The content of the file of the lock: a process and its host."""
_OWNER = ".owner"
_FORMER = ".former"
_OLD = ".old"


def storage_of(root: pathlib.Path) -> "Storage":
    """Returns the storage that a directory is in, from `directory_of`."""
    is_remote = checkpoint_files.is_remote(root)
    return RemoteStorage(root) if is_remote else Storage(root)


class Storage:
    """A directory of this machine, which only one training writes to.

    Args:
        root: The directory of the checkpoints.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def new_folder(self, final: pathlib.Path) -> Iterator[pathlib.Path]:
        """Puts a folder in place when its files have been written.

        Yields a folder of this machine.

        Args:
            final: Its later path. A former one is replaced.

        Raises:
            OSError: If it cannot be put there. Nothing remains of it then.
        """
        aside = final.with_name(f".{final.name}")
        self.remove(aside)
        aside.mkdir(parents=True)
        marker = aside / own_files.UNFINISHED
        try:
            marker.write_text(final.name)
            yield aside
            for path in aside.iterdir():
                _sync(path)
            marker.unlink()
            _sync(aside)
            self._replace(final, aside)
        except BaseException:
            self.remove(aside)
            raise

    def _replace(self, final: pathlib.Path, new: pathlib.Path) -> None:
        """Puts a folder in place of one that is kept until it is there."""
        former = final.with_name(f".{final.name}{_FORMER}")
        self.restore_former()
        self._remove_former(former)
        with contextlib.suppress(FileNotFoundError):
            final.rename(former)
        try:
            new.rename(final)
        except BaseException:
            self.restore_former()
            raise
        _sync(self.root)
        with contextlib.suppress(OSError):  # it is removed at the next start
            self._remove_former(former)

    def _remove_former(self, former: pathlib.Path) -> None:
        """Removes the replaced folder, or shows files of others there."""
        self.remove(former)
        if former.exists() and own_files.in_folder(former) is None:
            name = former.name[1:].removesuffix(_FORMER)
            former.rename(free_name(former.with_name(f"replaced-{name}")))

    def names_for(
        self, final: pathlib.Path, digests: dict[str, str]
    ) -> dict[str, str]:
        """Returns the names of a new folder's files.

        Args:
            final: The later path of the folder.
            digests: The digests of the files, by their names if nothing speaks
                against these.
        """
        return {name: name for name in digests}

    @contextlib.contextmanager
    def file(self, path: pathlib.Path) -> Iterator[pathlib.Path]:
        """Yields where this machine has a file."""
        with plain_files.open_file(path.parent, path.name):
            yield path

    def put_text(self, path: pathlib.Path, text: str) -> None:
        """Writes a file, or replaces it at once.

        Raises:
            OSError: If it cannot be written.
        """
        descriptor, aside = tempfile.mkstemp(
            dir=path.parent, prefix=f"{path.name}."
        )
        try:
            with open(descriptor, "w") as file:
                file.write(text)
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise

    def remove(self, folder: pathlib.Path) -> None:
        """Removes a folder, if it is there and only has files of this package.

        It loses its name first. With some of its files gone, it would look
        like a checkpoint that has been damaged.
        """
        name = folder.name.removeprefix(".").removesuffix(_OLD)
        nameless = folder.with_name(f".{name}{_OLD}")
        with contextlib.suppress(FileNotFoundError):
            _remove_own(nameless)
        with contextlib.suppress(FileNotFoundError):
            if own_files.in_folder(folder) is not None:
                folder.rename(nameless)
                _remove_own(nameless)

    def restore_former(self) -> None:
        """Puts back folders that a killed process was about to replace."""
        for former in self.root.glob(f".step-*{_FORMER}"):
            final = former.with_name(former.name[1:].removesuffix(_FORMER))
            if own_files.is_aside(former) and not final.exists():
                with contextlib.suppress(OSError):  # to be read only
                    former.rename(final)

    def remove_unfinished(self) -> None:
        """Removes folders that a killed process has left half-written."""
        self.restore_former()
        for path in self.root.glob(".step-*"):
            if own_files.is_aside(path):
                self.remove(path)

    def put_aside(self, folder: pathlib.Path) -> pathlib.Path:
        """Makes a damaged checkpoint count no more.

        Returns:
            The folder to remove; where it was, if this process may not move it.
        """
        if folder.is_symlink():
            return folder
        try:
            return folder.rename(
                free_name(folder.with_name(f"damaged-{folder.name}"))
            )
        except OSError:
            return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory, and keeps other processes from it.

        Raises:
            OSError: If nothing can be written there.
            RuntimeError: If another training writes there.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(self.root / _LOCK, flags, 0o644)
        except OSError as error:
            raise _not_writable(self.root, error) from error
        with open(lock, "rb+", buffering=0) as file:
            self._assert_regular(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = os.pread(lock, 300, 0).decode("utf-8", "replace")
                other = other or "unknown"
                raise RuntimeError(
                    f"Another training, process {other}, writes its "
                    f"checkpoints to {self.root}. End it, or give this one "
                    "another directory."
                ) from None
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"A training locks the directory of its checkpoints, and "
                    f"the file system of {self.root} cannot ({error.strerror})"
                    ". Mount it with locks, or choose another directory.",
                ) from error
            self._assert_own_lock(lock)
            os.ftruncate(lock, 0)
            here = f"{os.getpid()} on {socket.gethostname()}"
            os.pwrite(lock, here.encode(), 0)
            with forks.not_in_children(file.close):
                yield

    def _assert_regular(self, lock: int) -> None:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise self._not_own_lock()

    def _assert_own_lock(self, lock: int) -> None:
        content = os.pread(lock, 300, 0)
        if content and not _LOCKED.fullmatch(content):
            raise self._not_own_lock()

    def _not_own_lock(self) -> OSError:
        path = str(self.root / _LOCK)
        others = FileExistsError(errno.EEXIST, "A file of others", path)
        return _not_writable(self.root, others)


class RemoteStorage(Storage):
    """A directory that is named by a URL, such as one in a bucket.

    Args:
        root: A `upath.UPath`.
    """

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._owner: str | None = None

    @contextlib.contextmanager
    def new_folder(self, final: pathlib.Path) -> Iterator[pathlib.Path]:
        """See `Storage`."""
        with tempfile.TemporaryDirectory(prefix="keras_conflux-") as folder:
            aside = pathlib.Path(folder)
            yield aside
            self._assert_owned()
            self._put(aside, final)

    def names_for(
        self, final: pathlib.Path, digests: dict[str, str]
    ) -> dict[str, str]:
        """See `Storage`. A file that counts is not written to."""
        taken = {each.name for each in entries(final)}
        return {
            name: f"{digest[:8]}.{name}" if name in taken else name
            for name, digest in digests.items()
        }

    @contextlib.contextmanager
    def file(self, path: pathlib.Path) -> Iterator[pathlib.Path]:
        """See `Storage`."""
        with tempfile.TemporaryDirectory(prefix="keras_conflux-") as folder:
            here = pathlib.Path(folder, WEIGHTS)
            with os_errors(path):
                _copy(path, here)
            yield here

    def put_text(self, path: pathlib.Path, text: str) -> None:
        """See `Storage`."""
        with os_errors(path):
            path.write_text(text)

    def remove(self, folder: pathlib.Path) -> None:
        """See `Storage`. Files are known by their names only."""
        own = [each for each in entries(folder) if _is_own_name(each.name)]
        _remove_files(sorted(own, key=lambda p: p.name != STATE))
        remote: Any = folder
        with contextlib.suppress(Exception):  # buckets have no folders
            remote.fs.rmdir(remote.path)

    def restore_former(self) -> None:
        """See `Storage`. Nothing is replaced before the new one is there."""

    def remove_unfinished(self) -> None:
        """See `Storage`. A file that cannot be removed does no harm."""
        with contextlib.suppress(OSError):
            for folder in checkpoint_files.named_folders(self.root):
                names = {each.name for each in entries(folder)}
                if names.isdisjoint({STATE, _DAMAGED}):
                    self.remove(folder)

    def put_aside(self, folder: pathlib.Path) -> pathlib.Path:
        """See `Storage`."""
        with contextlib.suppress(OSError), os_errors(folder):
            _copy(folder / STATE, folder / _DAMAGED)
            _remove_files([folder / STATE])
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory, and notes whose it is.

        There are no locks. Who comes later takes it, and who was there before
        is told when it writes the next checkpoint.

        Raises:
            OSError: If nothing can be written there.
        """
        self._owner = secrets.token_hex(8)
        try:
            with os_errors(self.root):
                self._take()
        except OSError as error:
            raise _not_writable(self.root, error) from error
        yield

    def _put(self, folder: pathlib.Path, final: pathlib.Path) -> None:
        before = entries(final)
        new = [each for each in folder.iterdir() if each.name != STATE]
        try:
            with os_errors(final):
                _make(final)
                for path in new:
                    _copy(path, final / path.name)
        except BaseException:
            with contextlib.suppress(OSError):
                if self._is_owner():
                    kept = {each.name for each in before}
                    _remove_files(
                        final / p.name for p in new if p.name not in kept
                    )
            raise
        self._assert_owned()
        with os_errors(final):
            _copy(folder / STATE, final / STATE)
        counts = {STATE, *(each.name for each in new)}
        with contextlib.suppress(OSError):  # they go with the folder
            _remove_files(
                each
                for each in before
                if _is_own_name(each.name) and each.name not in counts
            )

    def _is_owner(self) -> bool:
        if self._owner is None:
            return True
        file = self.root / _OWNER
        with os_errors(file):
            try:
                return file.read_text() == self._owner
            except FileNotFoundError:  # somebody has emptied the directory
                self._take()
                return True

    def _take(self) -> None:
        _make(self.root)
        (self.root / _OWNER).write_text(self._owner or "")

    def _assert_owned(self) -> None:
        if not self._is_owner():
            raise RuntimeError(
                "Another training has begun to write its checkpoints to "
                f"{self.root}. End it, or give this one another directory."
            )


_DAMAGED = f"damaged-{STATE}"


def _is_own_name(name: str) -> bool:
    """Whether a file in a bucket is one of a checkpoint. See `names_for`."""
    return name == _DAMAGED or re.sub(r"^[0-9a-f]{8}\.", "", name) in {
        WEIGHTS,
        ARRAYS,
        STATE,
    }


def _remove_own(folder: pathlib.Path) -> None:
    """Removes a folder, unless it has files of others."""
    files = own_files.in_folder(folder)
    if files is not None:
        for path in files:
            path.unlink()
        folder.rmdir()


def free_name(path: pathlib.Path) -> pathlib.Path:
    """Returns a path where nothing is yet, like the given one."""
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
    return next(each for each in numbered if not os.path.lexists(each))


def _make(folder: Any) -> None:
    """Makes a folder, but no bucket: one that is not there is an error."""
    from upath.implementations.cloud import CloudPath

    if not isinstance(folder, CloudPath):
        folder.mkdir(parents=True, exist_ok=True)


def _remove_files(files: Iterable[Any]) -> None:
    for path in files:
        with os_errors(path), contextlib.suppress(FileNotFoundError):
            path.fs.rm_file(path.path)


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 2**24)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_writable(root: pathlib.Path, error: OSError) -> OSError:
    return OSError(
        f"Checkpoints cannot be written to {root}: {error}. Pass `Resume` a "
        "directory that this user may write to."
    )
